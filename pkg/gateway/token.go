package gateway

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/internal/tokenbucket"
)

// TokenState is a token of the API that may call models, with its limits. Snapshots have its keys. Its end is a time of
// this process's clock.
type TokenState struct {
	Hash [sha256.Size]byte `json:"hash"` // of the secret
	Name string            `json:"name"`
	// that it may name; empty: its own name, and names below it
	Flows []string `json:"flows"`
	// that it may use; empty: all, or none if Limited is set
	Models []string `json:"models"`
	// to queues or applications: it may use their models alone
	Limited     bool        `json:"limited"`
	Criticality Criticality `json:"criticality"` // at most
	// instead of Criticality: that of the flow, if one is set for it
	CriticalityOfFlow bool    `json:"criticality_of_flow"`
	Rate              float64 `json:"rate"`         // requests a second; 0: not limited
	InFlightMax       int     `json:"flying"`       // calls in flight; 0: not limited
	WaitingMax        int     `json:"waiting"`      // requests that wait; 0: not limited
	Weight            float64 `json:"weight"`       // of its flows; 0 is taken as 1
	PriorityMax       *int16  `json:"priority_max"` // that its entries may ask for; nil: any
	// entries a second, at each gateway; 0: not limited
	PushRate  float64   `json:"push_rate"`
	PushBurst int       `json:"push_burst"` // entries at once; 0: those of a second
	ExpiresAt time.Time `json:"expires_at,omitzero"`
	Budget    Budget    `json:"budget,omitzero"`
}

// Budget bounds the GPU milliseconds that the calls of a token's flows, and of flows below them, take in a period. The
// zero value is no bound.
type Budget struct {
	MS     int64     `json:"ms"`
	Spent  int64     `json:"spent"`  // as of the last reading
	Period string    `json:"period"` // hour or day
	Ends   time.Time `json:"ends"`   // of the period, by this process's clock
}

// refuse returns the refusal of new work if the budget is spent, with the time until the next period.
func (b Budget) refuse(now time.Time) *Rejection {
	if b.MS == 0 || b.Spent < b.MS || !now.Before(b.Ends) {
		return nil
	}
	return &Rejection{
		Reason: DropRate, RetryAfter: b.Ends.Sub(now),
		Detail: fmt.Sprintf("the calls of the token's flows have taken %d of %d GPU milliseconds of this %s; send the "+
			"request in the next one", b.Spent, b.MS, b.Period),
	}
}

// caller is a token with what its holder is doing just now.
type caller struct {
	TokenState
	use *tokenUse
}

// tokenUse counts what the tokens of one name do; it outlives the versions of the table.
type tokenUse struct {
	mu       sync.Mutex
	requests tokenbucket.Bucket // of requestRate
	pushes   tokenbucket.Bucket // of pushRate
	held     heldBytes
	inFlight int
	waiting  int

	admitted int64     // since the start
	last     time.Time // when one was admitted last

	elsewhere elsewhere // see tokencounts.go
}

// total is how many requests of the token are in flight, and wait, at all gateways; called with mu held. Reports that
// are old say nothing: the database is away.
func (u *tokenUse) total(now time.Time) (inFlight, waiting int) {
	if now.Sub(u.elsewhere.at) > countsKept {
		return u.inFlight, u.waiting
	}
	return u.inFlight + u.elsewhere.inFlight, u.waiting + u.elsewhere.waiting
}

// tokenTable finds tokens by the hash of their secret, without a statement.
type tokenTable struct {
	current atomic.Pointer[callers]
	uses    map[string]*tokenUse // touched by set alone
}

// callers are the tokens of one reading.
type callers struct {
	bySecret map[[sha256.Size]byte]*caller
	byName   map[string][]*caller
}

func (t *tokenTable) set(list []TokenState) {
	if t.uses == nil {
		t.uses = map[string]*tokenUse{}
	}
	fresh := callers{make(map[[sha256.Size]byte]*caller, len(list)), make(map[string][]*caller, len(list))}
	for _, s := range list {
		use := t.uses[s.Name]
		if use == nil {
			use = &tokenUse{}
			t.uses[s.Name] = use
		}
		c := &caller{s, use}
		fresh.bySecret[s.Hash] = c
		fresh.byName[s.Name] = append(fresh.byName[s.Name], c)
	}
	maps.DeleteFunc(t.uses, func(name string, use *tokenUse) bool { return fresh.byName[name] == nil && use.over() })
	t.current.Store(&fresh)
}

// over reports whether no request is in flight: those of a token that has ended go on, and count under its name.
func (u *tokenUse) over() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.inFlight == 0
}

// find returns the token of a secret, nil if there is none that is valid.
func (t *tokenTable) find(secret string, now time.Time) *caller {
	table := t.current.Load()
	if table == nil || len(secret) > 512 {
		return nil
	}
	c := table.bySecret[sha256.Sum256([]byte(secret))]
	if c == nil || !c.valid(now) {
		return nil
	}
	return c
}

// named returns the valid tokens of a name: two while one replaces the other.
func (t *tokenTable) named(name string) (list []*caller) {
	table := t.current.Load()
	if table == nil {
		return nil
	}
	now := time.Now()
	for _, c := range table.byName[name] {
		if c.valid(now) {
			list = append(list, c)
		}
	}
	return list
}

func (c *caller) valid(now time.Time) bool { return c.ExpiresAt.IsZero() || now.Before(c.ExpiresAt) }

func (c *caller) mayUse(model string) bool {
	return (len(c.Models) == 0 && !c.Limited) || slices.Contains(c.Models, model)
}

// rateBurst is for how long a token may save up requests that it did not make.
const rateBurst = time.Second

// requestRate bounds the requests of the token.
func (c *caller) requestRate() tokenbucket.Rate {
	return tokenbucket.Rate{PerSecond: c.Rate, Burst: max(1, c.Rate*rateBurst.Seconds())}
}

// held is what the requests of the tokens of the caller's name hold; nil without a token, where callers cannot be told
// apart.
func (c *caller) held() *heldBytes {
	if c == nil {
		return nil
	}
	return &c.use.held
}

// begin takes a request into account. The refusal says when there is room again. leave must follow. Only requests for
// work are refused for a spent budget: see Budget.refuse.
func (c *caller) begin(now time.Time) *Rejection {
	c.use.mu.Lock()
	defer c.use.mu.Unlock()
	inFlight, waiting := c.use.total(now)
	if c.InFlightMax > 0 && inFlight >= c.InFlightMax {
		return &Rejection{
			Reason: DropRate, RetryAfter: time.Second,
			Detail: "the token has as many requests in flight as it may",
		}
	}
	if c.WaitingMax > 0 && waiting >= c.WaitingMax {
		return &Rejection{
			Reason: DropRate, RetryAfter: time.Second,
			Detail: "as many requests of the token wait as may",
		}
	}
	if wait := c.use.requests.TakeAll(now, c.requestRate(), 1); wait > 0 {
		return &Rejection{
			Reason: DropRate, RetryAfter: wait,
			Detail: "the token makes more requests a second than it may",
		}
	}
	c.use.inFlight++
	c.use.waiting++
	c.use.admitted++
	c.use.last = now
	return nil
}

// dispatched notes that a request does not wait any more; leave that it is over.
func (c *caller) dispatched() {
	c.use.mu.Lock()
	c.use.waiting--
	c.use.mu.Unlock()
}

func (c *caller) leave() {
	c.use.mu.Lock()
	c.use.inFlight--
	c.use.mu.Unlock()
}
