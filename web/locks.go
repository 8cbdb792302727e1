package web

import (
	"cmp"
	"context"
	"fmt"
	"html/template"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/web/picture"
)

const (
	locksMax   = 1000 // that the matrix draws
	lockRows   = 50   // that the table lists
	groupRows  = 50
	suspectMax = 100
)

// locksView is the locks of all nodes, or of one queue's.
type locksView struct {
	Queue    string
	Queues   []string
	Nodes    []lockNode
	Legend   template.HTML
	Locks    int
	Capped   bool // there are more than locksMax
	Oldest   []lockRow
	Suspects []operator.Suspect
	Blocked  []blockedKey
	Groups   []groupRow
	After    string // the last key of Groups, if there may be more

	MoreBlocked  bool // there are more than blockedRows
	MoreSuspects bool // there are more than suspectMax
}

// lockNode is a node with the picture of its locks.
type lockNode struct {
	operator.Node
	Matrix, Data template.HTML
	Beat         time.Time // its last heartbeat
	Late         bool      // it is silent for more than half its lease
	sum          float64
}

// lockRow is a lock in the table.
type lockRow struct {
	operator.Lock
	Entry   string // address of its entry or entries
	P99     *float64
	Late    bool
	Problem string
}

// groupRow is a lock key with entries that wait or run.
type groupRow struct {
	operator.Group
	Address string
}

func (d *Dashboard) lockPages() {
	d.page(page{
		path: "locks", nav: "Locks", section: "Fleet", title: "Locks", template: "locks", live: true, read: d.locks,
	})
	d.verb(verb{
		name: "force_unlock", title: "Unlock by hand", role: administrator, destroys: true,
		objects: []string{"queue", "lock_key", "token"},
		fields: []field{
			{Name: confirmField, Label: "Type the token to confirm", Kind: "text", Required: true},
			{
				Name: "even_listed", Label: "Even if its node lives and lists the lock", Kind: "checkbox",
				Hint: "The run goes on at the worker, its result is refused, and the entry runs a second time.",
			},
		},
		effect: "Ends the lock, so that another node may claim the key at its old position. Recovery does the " +
			"same by itself within seconds when a node dies: a lock that it leaves alone is listed by a node that " +
			"lives.",
		preview: d.unlockPreview, do: d.forceUnlock,
	})
	d.blockedKeyVerbs()
}

func (d *Dashboard) unlockPreview(ctx context.Context, in form) (preview, error) {
	token, err := in.ID("token")
	if err != nil {
		return preview{}, err
	}
	found, err := d.db.Locks(ctx, operator.LockFilter{Queue: in.Get("queue"), After: token - 1, Limit: 1})
	if err != nil {
		return preview{}, err
	}
	if len(found) == 0 || found[0].Token != token {
		return preview{Warning: "There is no such lock any more: nothing is left to unlock."}, nil
	}
	l := found[0]
	return preview{
		Count: fmt.Sprintf("1 lock over %d entries", l.Entries),
		Facts: []fact{{"node", l.Node}, {"held since", l.ClaimedAt.UTC().Format(exactTime)}},
	}, nil
}

func (d *Dashboard) forceUnlock(ctx context.Context, in form, by invalidation.By) (string, error) {
	token, err := in.ID("token")
	if err != nil || in.Get(confirmField) != in.Get("token") {
		return "", fmt.Errorf("the token that you typed is not that of the lock: %w", invalidation.ErrInvalid)
	}
	err = d.change.ForceUnlock(ctx, operator.Unlock{
		Queue: in.Get("queue"), LockKey: in.Get("lock_key"), Token: token,
		EvenListed: in.Get("even_listed") != "", By: by,
	})
	return fmt.Sprintf("The lock with token %d is ended; its key is ready again.", token), err
}

func (d *Dashboard) locks(ctx context.Context, q query) (any, error) {
	v := locksView{Queue: q.Get("queue"), Legend: picture.LockLegend()}
	queues, err := d.sampledQueues(ctx)
	if err != nil {
		return nil, err
	}
	for _, queue := range queues {
		v.Queues = append(v.Queues, queue.Name)
	}
	locks, err := cached(ctx, d, keyOf("locks", v.Queue), beat,
		func(ctx context.Context) ([]operator.Lock, error) {
			return d.db.Locks(ctx, operator.LockFilter{Queue: v.Queue, Limit: locksMax + 1})
		})
	if err != nil {
		return nil, err
	}
	if v.Capped = len(locks) > locksMax; v.Capped {
		locks = locks[:locksMax]
	}
	v.Locks = len(locks)
	if v.Suspects, err = cached(ctx, d, "suspects", 2*time.Second,
		func(ctx context.Context) ([]operator.Suspect, error) {
			return d.db.VerifyLocks(ctx, 0, suspectMax+1)
		}); err != nil {
		return nil, err
	}
	if v.MoreSuspects = len(v.Suspects) > suspectMax; v.MoreSuspects {
		v.Suspects = v.Suspects[:suspectMax]
	}
	if err := v.listBlocked(ctx, d); err != nil {
		return nil, err
	}
	times, err := d.runTimes(ctx, locks)
	if err != nil {
		return nil, err
	}
	nodes, err := d.nodes(ctx)
	if err != nil {
		return nil, err
	}
	v.arrange(d, locks, nodes, times)
	return v, v.listGroups(ctx, d, q.Get("after"))
}

// runTimes returns the run times of the queues that some locks belong to, by name.
func (d *Dashboard) runTimes(ctx context.Context, locks []operator.Lock) (map[string]operator.RunTimes, error) {
	var names []string
	for _, l := range locks {
		names = append(names, l.Queue)
	}
	slices.Sort(names)
	names = slices.Compact(names)
	if len(names) == 0 {
		return nil, nil
	}
	key := keyOf("run times", names)
	found, err := cached(ctx, d, key, 15*time.Second, func(ctx context.Context) ([]operator.RunTimes, error) {
		return d.db.RunTimes(ctx, names...)
	})
	if err != nil {
		return nil, err
	}
	times := make(map[string]operator.RunTimes, len(found))
	for _, t := range found {
		times[t.Queue] = t
	}
	return times, nil
}

// arrange puts locks under their nodes. A node without a row has one of its own, because its locks are to be seen.
func (v *locksView) arrange(
	d *Dashboard, locks []operator.Lock, nodes []operator.Node, times map[string]operator.RunTimes,
) {
	problems := map[int64]string{}
	for _, s := range v.Suspects {
		problems[s.Token] = s.Problem
	}
	of := map[operator.NodeID][]operator.Lock{}
	for _, l := range locks {
		of[l.NodeID] = append(of[l.NodeID], l)
		if len(v.Oldest) < lockRows {
			v.Oldest = append(v.Oldest, d.lockRow(l, times, problems))
		}
	}
	for _, n := range nodes {
		if n.Locks > 0 || n.State != "dead" && n.Kind != "gateway" {
			v.Nodes = append(v.Nodes, d.lockNode(n, of[n.ID], times, problems, v.Queue == ""))
		}
		delete(of, n.ID)
	}
	for id, held := range of {
		n := operator.Node{
			ID: id, Name: cmp.Or(held[0].Node, fmt.Sprintf("node %d", id)), State: "not registered",
			Locks: int64(len(held)),
		}
		v.Nodes = append(v.Nodes, d.lockNode(n, held, times, problems, false))
	}
	slices.SortStableFunc(v.Nodes, func(a, b lockNode) int {
		return cmp.Or(-cmp.Compare(a.sum, b.sum), cmp.Compare(a.Name, b.Name))
	})
}

func (d *Dashboard) lockRow(l operator.Lock, times map[string]operator.RunTimes, problems map[int64]string) lockRow {
	row := lockRow{Lock: l, Entry: d.entriesOf(l.Queue, l.LockKey), P99: times[l.Queue].P99, Problem: problems[l.Token]}
	row.Late = row.P99 != nil && l.AgeSeconds > *row.P99
	return row
}

// entriesOf is the address of the entry of a solo lock, or of the list of a key's entries.
func (d *Dashboard) entriesOf(queue, key string) string {
	if id, solo := strings.CutPrefix(key, "#"); solo {
		return d.cfg.Path + "entries/" + id
	}
	address, err := d.link("entries", "queue", queue, "lock_key", key)
	if err != nil {
		return ""
	}
	return address
}

func (d *Dashboard) lockNode(
	n operator.Node, locks []operator.Lock, times map[string]operator.RunTimes, problems map[int64]string, all bool,
) lockNode {
	m := picture.LockMatrix{Node: n.Name}
	row := lockNode{Node: n, Beat: time.Now().Add(-seconds(n.SilentSeconds)), Late: n.SilentSeconds > n.LeaseSeconds/2}
	for _, l := range locks {
		c := picture.LockCell{
			Key: l.Queue + " " + l.LockKey, Age: math.Round(l.AgeSeconds), P99: math.NaN(),
			Problem: problems[l.Token], Href: d.entriesOf(l.Queue, l.LockKey),
		}
		if p99 := times[l.Queue].P99; p99 != nil {
			c.P99 = *p99
			row.sum = max(row.sum, l.AgeSeconds / *p99)
		}
		m.Locks = append(m.Locks, c)
	}
	if all {
		m.Idle = int(n.Threads) - max(len(locks), int(n.Locks)) // the page has the oldest locks of all nodes alone
	}
	row.Matrix, row.Data = m.HTML(), picture.Data(m.Table())
	return row
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// listGroups reads the lock keys of the chosen queue.
func (v *locksView) listGroups(ctx context.Context, d *Dashboard, after string) error {
	if v.Queue == "" {
		return nil
	}
	groups, err := cached(ctx, d, keyOf("groups", v.Queue, after), 2*time.Second,
		func(ctx context.Context) ([]operator.Group, error) {
			return d.db.Groups(ctx, v.Queue, after, groupRows)
		})
	if err != nil {
		return err
	}
	for _, g := range groups {
		v.Groups = append(v.Groups, groupRow{g, d.entriesOf(v.Queue, g.LockKey)})
	}
	if len(groups) == groupRows {
		v.After = groups[len(groups)-1].LockKey
	}
	return nil
}
