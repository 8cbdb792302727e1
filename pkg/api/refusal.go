package api

import (
	"context"
	"errors"
	"sync"
	"time"
)

// refusalsLogged is how many refused requests the log names in a second: strangers must not be able to fill a disk.
const refusalsLogged = 5

// refusals counts requests that were refused for their token or for the lack of one.
type refusals struct {
	mu     sync.Mutex
	second int64
	n      int
}

// loggable tells whether one more refusal may be logged now.
func (r *refusals) loggable(now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if second := now.Unix(); second != r.second {
		r.second, r.n = second, 0
	}
	r.n++
	return r.n <= refusalsLogged
}

// logRefusal logs a request that was refused for its token, with the name of the token if it is known.
func (a *API) logRefusal(ctx context.Context, r route, from string, c caller, err error) {
	if (errors.Is(err, errNoToken) || errors.Is(err, errForbidden)) && a.refusals.loggable(time.Now()) {
		a.cfg.Log.WarnContext(ctx, "request refused", "route", r.method+" "+r.path, "from", from, "token", c.Name,
			"error", err)
	}
}
