package operator

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// NodeID is the random id of a node. As JSON it is a text: JavaScript's numbers cannot tell two of them apart.
type NodeID int64

// MarshalText writes the digits.
func (id NodeID) MarshalText() ([]byte, error) { return strconv.AppendInt(nil, int64(id), 10), nil }

// UnmarshalText reads them.
func (id *NodeID) UnmarshalText(text []byte) error {
	n, err := strconv.ParseInt(string(text), 10, 64)
	*id = NodeID(n)
	return err
}

// Node is one start of a process.
type Node struct {
	ID            NodeID          `json:"id"`
	Name          string          `json:"name"`
	Application   string          `json:"application"`
	Kind          string          `json:"kind" doc:"task or gateway."`
	State         string          `json:"state" doc:"live, draining or dead."`
	SilentSeconds float64         `json:"silent_seconds"`
	LeaseSeconds  float64         `json:"lease_seconds"`
	Threads       int32           `json:"threads"`
	Locks         int64           `json:"locks"`
	Queues        []string        `json:"queues"`
	StartedAt     time.Time       `json:"started_at"`
	DrainBy       string          `json:"drain_by,omitempty"`
	DrainReason   string          `json:"drain_reason,omitempty"`
	Load          json.RawMessage `json:"load"`
}

const nodeColumns = `
SELECT id, name, application, kind, state, extract(epoch FROM silent_for)::float8 AS silent_seconds,
       extract(epoch FROM lease)::float8 AS lease_seconds, threads, locks, queues, started_at,
       coalesce(drain_by, '') AS drain_by, coalesce(drain_reason, '') AS drain_reason, load
  FROM penstock.node_status`

// NodeKey is the position of a Node in the list.
type NodeKey struct {
	Name string
	ID   NodeID
}

// NodeFilter chooses nodes.
type NodeFilter struct {
	Node  string  // a name, which several starts of a process may have, or an id; empty: all
	After NodeKey // the last row of the page before
	Limit int
}

// nodesSQL chooses the rows before it counts their locks.
const nodesSQL = nodeColumns + `
 WHERE id = ANY (ARRAY(
       SELECT x.id FROM penstock.node x
        WHERE (x.name COLLATE "C", x.id) > ($1, $2) AND ($3::text IS NULL OR x.name = $3 OR x.id = $4::bigint)
        ORDER BY x.name COLLATE "C", x.id LIMIT $5))
 ORDER BY name COLLATE "C", id`

// Nodes returns the registered nodes by name, those of one name by id.
func (d *Database) Nodes(ctx context.Context, f NodeFilter) ([]Node, error) {
	var id *int64
	if n, err := strconv.ParseInt(f.Node, 10, 64); err == nil {
		id = &n
	}
	return list[Node](ctx, d.db, "nodes", nodesSQL, f.After.Name, int64(f.After.ID), given(f.Node), id, page(f.Limit))
}

// Node returns the node of an id, or invalidation.ErrNotFound.
func (d *Database) Node(ctx context.Context, id int64) (Node, error) {
	const sql = nodeColumns + ` WHERE id = $1`
	return show[Node](ctx, d.db, fmt.Sprintf("node %d", id), invalidation.ErrNotFound, sql, id)
}

const nodesOfEachStateSQL = nodeColumns + `
 WHERE id = ANY (ARRAY(
       SELECT x.id FROM (SELECT s.id, row_number() OVER (PARTITION BY s.kind, s.state ORDER BY s.name, s.id) AS place
                           FROM penstock.node_status s) x
        ORDER BY x.place LIMIT $1))
 ORDER BY name, started_at, id`

// NodesOfEachState returns the registered nodes by name. If there are more than limit, it takes the first by name of
// each kind and state in turn: a few gateways or dead nodes are not hidden by many live nodes.
func (d *Database) NodesOfEachState(ctx context.Context, limit int) ([]Node, error) {
	return list[Node](ctx, d.db, "nodes", nodesOfEachStateSQL, page(limit))
}

// FindNode returns the node of an id or a name. Of several incarnations with one name it returns
// the live one, and invalidation.ErrState if more than one is live.
func FindNode(ctx context.Context, among interface {
	Nodes(ctx context.Context, f NodeFilter) ([]Node, error)
}, wanted string,
) (Node, error) {
	nodes, err := among.Nodes(ctx, NodeFilter{Node: wanted, Limit: PageMax})
	if err != nil {
		return Node{}, err
	}
	var named, living []Node
	for _, n := range nodes {
		switch {
		case fmt.Sprint(n.ID) == wanted:
			return n, nil
		case n.Name == wanted && n.State != "dead":
			living = append(living, n)
		}
		if n.Name == wanted {
			named = append(named, n)
		}
	}
	if len(living) == 1 {
		return living[0], nil
	}
	switch len(named) {
	case 0:
		return Node{}, fmt.Errorf("find node %q: %w", wanted, invalidation.ErrNotFound)
	case 1:
		return named[0], nil
	}
	return Node{}, fmt.Errorf("find node %q: %d nodes have this name, give the id: %w", wanted, len(named),
		invalidation.ErrState)
}
