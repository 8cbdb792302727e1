package maintenance

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// open is a fence that lets everything through.
type open struct{ db postgres.DB }

func (o open) InTx(ctx context.Context, fn func(pgx.Tx) error) error {
	return postgres.InTx(ctx, o.db, fn)
}

func (o open) Hold(context.Context, pgx.Tx) error { return nil }

// Entries may be due in any year: one that is due in thousands does not keep the duty busy.
func TestAnEntryThatIsDueInThousandsOfYearsIsWaitedFor(t *testing.T) {
	d := NewDeadlines(nil, nil, Config{})
	for _, seconds := range []float64{1, 1e9, 2.2e11} {
		next, err := d.serve(t.Context(), invalidation.NextWork{Due: &seconds})
		if err != nil || next != d.cfg.Pause {
			t.Errorf("due in %.0f s: the next pass is after %v, want %v; %v", seconds, next, d.cfg.Pause, err)
		}
	}
}

// slow is a database whose round trips of several statements take so long.
type slow struct {
	postgres.DB
	takes time.Duration
}

func (s slow) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	select {
	case <-ctx.Done():
	case <-time.After(s.takes):
	}
	return s.DB.SendBatch(ctx, b)
}

// The bound on a reading grows until the reading fits, also where the list of queues and other parts come at once.
func TestAPartOfTheQueuesThatIsSlowIsReadInTheEnd(t *testing.T) {
	pool := pgtest.New(t)
	if _, err := invalidation.Create(t.Context(), pool, "work", invalidation.Config{}); err != nil {
		t.Fatal(err)
	}
	d := NewDeadlines(slow{pool, 700 * time.Millisecond}, open{pool}, Config{})
	d.reads.ForLease(time.Second)
	var err error
	for range 5 {
		if _, err = d.pass(t.Context()); err == nil {
			return
		}
	}
	t.Errorf("the queue is never read: %v", err)
}

// Each pass makes a step at least, however slow the machine is, and a step reads some 4800 of these keys.
func TestLongBacklogIsTidiedBeforeTheUsualPause(t *testing.T) {
	pool := pgtest.New(t)
	q, err := invalidation.Create(t.Context(), pool, "work", invalidation.Config{})
	if err != nil {
		t.Fatal(err)
	}
	const keys = 100_000
	if _, err := pool.Exec(t.Context(), `INSERT INTO penstock.idempotency (entry_id, created_at, queue_id, flow, key, fingerprint)
		SELECT -i, now() - interval '2 days', $1, '', 'k' || i, decode(md5(i::text), 'hex') FROM generate_series(1, $2::int) i`, q.ID, keys); err != nil {
		t.Fatal(err)
	}
	duty := NewRetention(pool, open{pool}, Config{RetentionPause: 1000 * time.Hour})
	passes := 1
	for ; passes < 30; passes++ {
		pause, err := duty.pass(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if pause == 1000*time.Hour {
			break
		}
	}
	if n := duty.Status().Tidied; n != keys {
		t.Errorf("tidied %d of %d keys in %d passes before the usual pause", n, keys, passes)
	}
}

func TestTidyingUsesAShareOfTheTimeWhileRowsAreLeft(t *testing.T) {
	for what, c := range map[string]struct {
		left backlog
		took time.Duration
		want time.Duration
	}{
		"nothing left":                    {backlog{deleted: 9000, steps: 1}, time.Second, time.Minute},
		"rows left":                       {backlog{more: true, deleted: 90_000, steps: 20}, time.Second, 4 * time.Second},
		"a hundredth of a batch a step":   {backlog{more: true, deleted: 2000, steps: 20}, time.Second, 4 * time.Second},
		"a large table of rows that stay": {backlog{more: true, deleted: 1999, steps: 20}, time.Second, 19 * time.Second},
		"a slow database":                 {backlog{more: true, deleted: 90_000, steps: 20}, 20 * time.Second, time.Minute},
		"a step that is refused":          {backlog{more: true, refused: true, deleted: 90_000, steps: 20}, time.Second, time.Minute},
	} {
		if got := c.left.pause(c.took, time.Minute); got != c.want {
			t.Errorf("%s: the pause after a pass of %v is %v, want %v", what, c.took, got, c.want)
		}
	}
}

// rollUps is a database, and the term of its leader, that counts how often minutes are rolled up.
type rollUps struct {
	Fence
	pgx.Tx
	n int
}

func (r *rollUps) Begin(context.Context) (pgx.Tx, error) { return r, nil }

func (r *rollUps) Exec(_ context.Context, sql string, _ ...any) (pgconn.CommandTag, error) {
	if sql == rollUpSQL {
		r.n++
	}
	return pgconn.CommandTag{}, nil
}

func (r *rollUps) Hold(context.Context, pgx.Tx) error { return nil }

func (r *rollUps) Commit(context.Context) error { return nil }

func (r *rollUps) Rollback(context.Context) error { return nil }

func TestMinutesAreRolledUpAfterTheClockOfTheLeaderWasSetBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		term := &rollUps{}
		s := &Samples{db: term, fence: term}
		var got []int
		rollUp := func() {
			if err := s.rollUp(t.Context()); err != nil {
				t.Fatal(err)
			}
			got = append(got, term.n)
		}
		for _, pause := range []time.Duration{0, time.Second, time.Minute} {
			time.Sleep(pause)
			rollUp()
		}
		s.rolledUp = s.rolledUp.Add(2 * time.Hour)
		rollUp()
		if want := []int{1, 1, 2, 3}; !slices.Equal(got, want) {
			t.Errorf("minutes had been rolled up %v times, want %v", got, want)
		}
	})
}
