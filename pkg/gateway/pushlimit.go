package gateway

import (
	"fmt"
	"math"
	"time"

	"github.com/penstock/penstock/internal/tokenbucket"
)

// The limits of a token on pushes hold for the entries that its requests become here, as they do at the API: each
// gateway counts by itself, as each leader does, and tokens of one name share the rate.

// pushRate bounds the entries of the token.
func (c *caller) pushRate() tokenbucket.Rate {
	if c == nil {
		return tokenbucket.Rate{}
	}
	rate := tokenbucket.Rate{PerSecond: c.PushRate, Burst: max(1, math.Ceil(c.PushRate))}
	if c.PushBurst > 0 {
		rate.Burst = float64(c.PushBurst)
	}
	return rate
}

// pushes takes up to n entries from the rate of the token, and returns how many. The refusal is that of the rest.
func (c *caller) pushes(now time.Time, n int) (may int, refused *Rejection) {
	if c == nil {
		return n, nil
	}
	c.use.mu.Lock()
	defer c.use.mu.Unlock()
	may, wait := c.use.pushes.TakeSome(now, c.pushRate(), n)
	if may == n {
		return n, nil
	}
	return may, &Rejection{
		Reason: DropRate, RetryAfter: wait,
		Detail: fmt.Sprintf("the token pushes more entries than it may, %v a second", c.PushRate),
	}
}

// PushOne takes an entry that a request of a mounted route is to become from the rate of the token.
func (r Requester) PushOne() error {
	if may, refused := r.caller.pushes(time.Now(), 1); may == 0 {
		return refused
	}
	return nil
}

// MayPush returns how many of n entries a client may push now, which takes them from the rate of its token, where work
// goes on after its request. The caller gives back those that it does not push. One that comes again within fill loses
// nothing of the rate; 0: there is none.
func (g *Gateway) MayPush(token string, n int) (may int, fill time.Duration) {
	c := g.limitedCaller(token)
	may, _ = c.pushes(time.Now(), n)
	return may, c.pushRate().Fill()
}

// GiveBackPushes returns entries to the rate that MayPush took and that were not pushed.
func (g *Gateway) GiveBackPushes(token string, n int) {
	if c := g.limitedCaller(token); c != nil {
		c.use.mu.Lock()
		c.use.pushes.Return(c.pushRate(), float64(n))
		c.use.mu.Unlock()
	}
}

// limitedCaller returns a valid token of a name, whose limits are those of the name; nil: there is none.
func (g *Gateway) limitedCaller(token string) *caller {
	if g.config.Open {
		return nil
	}
	for _, c := range g.tokens.named(token) {
		return c
	}
	return nil
}
