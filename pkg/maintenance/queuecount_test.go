package maintenance

import (
	"bytes"
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// laden is a database where each statement of a round trip takes so long. Nothing is due.
type laden struct {
	postgres.DB
	takes time.Duration
	slow  int           // a queue whose statement takes longer; 0: none
	more  time.Duration // how much longer
	read  map[int32]int // answers that came in time, by queue
}

func (l *laden) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	lasts := time.Duration(b.Len()) * l.takes
	for _, q := range b.QueuedQueries {
		if q.Arguments[0] == int32(l.slow) {
			lasts += l.more
		}
	}
	select {
	case <-ctx.Done():
	case <-time.After(lasts):
	}
	return ladenAnswer{err: ctx.Err(), of: b, read: l.read}
}

// ladenAnswer is the answer to a round trip, and each of its rows.
type ladenAnswer struct {
	pgx.BatchResults
	err  error
	of   *pgx.Batch
	read map[int32]int
}

func (a ladenAnswer) Close() error {
	if a.err != nil {
		return a.err
	}
	for _, q := range a.of.QueuedQueries {
		queue, _ := q.Arguments[0].(int32)
		a.read[queue]++
		if err := q.Fn(a); err != nil {
			return err
		}
	}
	return nil
}

func (a ladenAnswer) QueryRow() pgx.Row { return a }
func (a ladenAnswer) Scan(...any) error { return a.err }

// That there are many queues, or that one is slow, ends no term while the database answers, and each queue is read.
func TestManyQueuesAreReadOnASlowDatabase(t *testing.T) {
	for name, db := range map[string]*laden{
		"all slow": {takes: 272 * time.Millisecond},
		"one slow": {takes: time.Millisecond, slow: 321, more: 8 * time.Second},
		"a lock":   {takes: time.Millisecond, slow: 321, more: time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				queues := make([]*invalidation.Queue, 1000)
				for i := range queues {
					queues[i] = &invalidation.Queue{ID: int32(i + 1), Name: "q"}
				}
				db.read = map[int32]int{}
				d := NewDeadlines(db, nil, Config{})
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
				defer cancel()
				err := d.cfg.loop("deadlines").Run(ctx, func(ctx context.Context) (time.Duration, error) {
					return d.visit(ctx, queues)
				})
				if err != nil {
					t.Errorf("the term ended: %v", err)
				}
				for _, q := range queues {
					if db.read[q.ID] == 0 && (int(q.ID) != db.slow || db.more < time.Hour) {
						t.Fatalf("queue %d is never read", q.ID)
					}
				}
			})
		})
	}
}

// The log said that queues could not be read in time, and never that they could again.
func TestQueuesThatAreReadInTimeAgainHaveALine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		queues := make([]*invalidation.Queue, 1000)
		for i := range queues {
			queues[i] = &invalidation.Queue{ID: int32(i + 1), Name: "q"}
		}
		db := &laden{takes: time.Millisecond, slow: 321, more: time.Hour, read: map[int32]int{}}
		var text bytes.Buffer
		d := NewDeadlines(db, nil, Config{Log: slog.New(slog.NewTextHandler(&text, nil))})
		for range 2 {
			if _, err := d.visit(t.Context(), queues); err != nil {
				t.Fatal(err)
			}
			db.more = 0
		}
		want := []string{"trying again", "works again"}
		if lines := strings.Split(strings.TrimSpace(text.String()), "\n"); !slices.EqualFunc(lines, want, strings.Contains) {
			t.Errorf("the log is %s, want lines with %q", text.String(), want)
		}
	})
}
