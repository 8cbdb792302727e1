package prediction

import (
	"context"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// waitLongest is how long a request may wait for its prediction.
const waitLongest = time.Minute

// waitOf reads Prefer: wait, or wait=n; 0: the request does not wait.
func waitOf(h http.Header) (time.Duration, error) {
	for _, value := range h.Values("Prefer") {
		for part := range strings.SplitSeq(value, ",") {
			name, given, has := strings.Cut(strings.TrimSpace(part), "=")
			if strings.ToLower(name) != "wait" {
				continue
			}
			if !has {
				return waitLongest, nil
			}
			n, err := strconv.Atoi(strings.TrimSpace(given))
			if err != nil || n < 1 || n > 60 {
				return 0, invalid("Prefer", "wait is %q: want 1 to 60 seconds", given)
			}
			return time.Duration(n) * time.Second, nil
		}
	}
	return 0, nil
}

// waited returns the prediction when it has ended, or as it is after d.
func (s *Predictions) waited(ctx context.Context, p row, d time.Duration) (row, error) {
	bounded, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	s.Await(bounded, p.Queue, p.Entry)
	return find(ctx, s.db, p.Owner, p.ID)
}

// Await returns when an entry has ended, or ctx has. All that wait share one poll of the database.
func (s *Predictions) Await(ctx context.Context, queue int32, entry int64) {
	w, err := s.watch.Wait(queue, invalidation.EntryID(entry), "")
	if err != nil {
		return // never: their number is not bounded here, but by the gateway's connections
	}
	defer w.Leave()
	for !w.News().Ended {
		select {
		case <-w.Changed:
		case <-ctx.Done():
			return
		}
	}
}
