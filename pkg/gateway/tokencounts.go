package gateway

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// The limits of a token hold over all gateways: each reports with its heartbeats what the requests of limited tokens
// do, and takes the reports of the others into account as if those were its own requests. What they did since their
// last reports, two seconds at most, is not known. While the database is away each gateway counts its own requests
// alone.

// TokenCounts are the requests of the tokens of one name at one gateway. Gateways of other versions read its keys.
type TokenCounts struct {
	InFlight int   `json:"flying,omitempty"`   // that are not over
	Waiting  int   `json:"waiting,omitempty"`  // of those, the ones that wait
	Admitted int64 `json:"admitted,omitempty"` // since the gateway started; those that a limit refused are not counted
}

// tokenReports are the last ones of the other gateways.
type tokenReports struct {
	mu       sync.Mutex
	at       time.Time // when they were read
	admitted map[invalidation.NodeID]map[string]int64
}

// countsKept is for how long a report is used, and for how long a token is reported that does nothing.
const countsKept = 5 * time.Second

// TokenCounts returns what the requests of tokens with limits do, by the names of the tokens. Tokens that have done
// nothing of late are left out.
func (g *Gateway) TokenCounts() map[string]TokenCounts {
	now := time.Now()
	list := map[string]TokenCounts{}
	table := g.tokens.current.Load()
	if table == nil {
		return list
	}
	for name, callers := range table.byName {
		limited := false
		for _, c := range callers {
			limited = limited || c.Rate > 0 || c.InFlightMax > 0 || c.WaitingMax > 0
		}
		if !limited {
			continue
		}
		use := callers[0].use
		use.mu.Lock()
		if use.inFlight > 0 || now.Sub(use.last) < 2*countsKept {
			list[name] = TokenCounts{InFlight: use.inFlight, Waiting: use.waiting, Admitted: use.admitted}
		}
		use.mu.Unlock()
	}
	return list
}

const countsSQL = `
SELECT n.id, n.load->'tokens'
  FROM penstock.node n
 WHERE n.kind = 'gateway' AND n.id <> $1 AND n.beat_at > clock_timestamp() - $2::interval
   AND jsonb_typeof(n.load->'tokens') = 'object'`

// ReadTokenCounts reads the reports of the gateways other than one.
func ReadTokenCounts(ctx context.Context, db postgres.DB,
	own invalidation.NodeID,
) (map[invalidation.NodeID]map[string]TokenCounts, error) {
	reports := map[invalidation.NodeID]map[string]TokenCounts{}
	var node invalidation.NodeID
	var text []byte
	_, err := pgx.ForEachRow(postgres.Query(ctx, db, countsSQL, own, countsKept), []any{&node, &text}, func() error {
		var counts map[string]TokenCounts
		if json.Unmarshal(text, &counts) == nil { // another version of a gateway may report otherwise
			reports[node] = counts
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the counts of tokens at other gateways: %w", err)
	}
	return reports, nil
}

// SetTokenCounts takes in the reports of the other gateways.
func (g *Gateway) SetTokenCounts(reports map[invalidation.NodeID]map[string]TokenCounts) {
	table := g.tokens.current.Load()
	if table == nil {
		return
	}
	now := time.Now()
	o := &g.others
	o.mu.Lock()
	defer o.mu.Unlock()
	since, before := now.Sub(o.at), o.admitted
	o.at, o.admitted = now, map[invalidation.NodeID]map[string]int64{}
	for node, counts := range reports {
		o.admitted[node] = map[string]int64{}
		maps.Copy(o.admitted[node], before[node]) // of tokens that are not reported just now
		for name, c := range counts {
			o.admitted[node][name] = c.Admitted
		}
		maps.DeleteFunc(o.admitted[node], func(name string, _ int64) bool { return table.byName[name] == nil })
	}
	for name, callers := range table.byName {
		c := callers[0] // the limits are those of the name
		most := c.Rate * (since + rateBurst).Seconds()
		var sum elsewhere
		for node, counts := range reports {
			sum.inFlight += max(0, counts[name].InFlight)
			sum.waiting += max(0, counts[name].Waiting)
			sum.gateways++
			if earlier, met := before[node]; met && since <= countsKept { // after a longer time each has counted alone
				sum.admitted += max(0, min(float64(o.admitted[node][name]-earlier[name]), most+1))
			}
		}
		c.othersDid(now, sum)
	}
}

// elsewhere is what requests of a token do at other gateways.
type elsewhere struct {
	inFlight, waiting int
	admitted          float64   // since their last reports
	gateways          int       // that have reported
	at                time.Time // when they were read
}

// othersDid takes the reports of the other gateways into account.
func (c *caller) othersDid(now time.Time, sum elsewhere) {
	c.use.mu.Lock()
	defer c.use.mu.Unlock()
	sum.at = now
	c.use.elsewhere = sum
	if c.Rate <= 0 || sum.admitted == 0 {
		return
	}
	// It comes off what this gateway admits, but for what would take too long.
	owed := min(sum.admitted, max(owedMax.Seconds()*c.Rate, float64(sum.gateways)))
	c.use.requests.Take(now, c.requestRate(), owed)
}

// owedMax bounds for how long a token is refused for what other gateways have admitted since their last reports,
// if that was more than a request of each.
const owedMax = 30 * time.Second
