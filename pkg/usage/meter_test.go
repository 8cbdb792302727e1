package usage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// used is the use of a flow.
type used struct {
	calls int
	time  time.Duration
}

// sent is a fold as the database got it.
type sent struct {
	node invalidation.NodeID
	seq  int64
	rows []Row[string, used]
}

// database adds the folds that it gets, and fails them by its error.
type database struct {
	postgres.DB
	node   invalidation.NodeID
	ahead  time.Duration
	fail   func(sent) error
	folds  []sent
	last   map[invalidation.NodeID]int64
	totals map[string]used
}

func newMeter(d *database) *Meter[string, used] {
	d.last, d.totals = map[invalidation.NodeID]int64{}, map[string]used{}
	return New(Config[string, used]{
		DB: d, Node: func() invalidation.NodeID { return d.node }, Every: time.Second, EndMax: 2 * time.Second,
		Step: "fold", Log: slog.New(slog.DiscardHandler), Compare: cmp.Compare[string],
		Add:   func(to *used, more used) { to.calls += more.calls; to.time += more.time },
		Times: func(of *used) []*time.Duration { return []*time.Duration{&of.time} },
		Send: func(
			ctx context.Context, _ postgres.DB, node invalidation.NodeID, seq int64, rows []Row[string, used],
		) (time.Time, error) {
			return d.fold(ctx, sent{node, seq, rows})
		},
	})
}

func (d *database) fold(ctx context.Context, f sent) (time.Time, error) {
	d.folds = append(d.folds, f)
	if d.fail != nil {
		if err := d.fail(f); err != nil {
			return time.Time{}, err
		}
	}
	if ctx.Err() == nil && f.seq > d.last[f.node] {
		d.last[f.node] = f.seq
		for _, r := range f.rows {
			sum := d.totals[r.Key]
			d.totals[r.Key] = used{sum.calls + r.Used.calls, sum.time + r.Used.time}
		}
	}
	return time.Now().Add(d.ahead), ctx.Err()
}

// QueryRow is the reading of the clock.
func (d *database) QueryRow(context.Context, string, ...any) pgx.Row { return clockRow{d.ahead} }

type clockRow struct{ ahead time.Duration }

func (c clockRow) Scan(to ...any) error {
	*to[0].(*time.Time) = time.Now().Add(c.ahead) //nolint:errcheck,forcetypeassert // the time
	return nil
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

var (
	errAway    = errors.New("connection reset")
	errRefused = fmt.Errorf("fold: %w", &pgconn.PgError{Code: "22003", Message: "bigint out of range"})
)

// What has come in a long outage goes in folds that end in time, in the order of the keys.
func TestAFoldIsBounded(t *testing.T) {
	d := &database{}
	m := newMeter(d)
	for i := range 2*rowsMax + 1 {
		m.Add(fmt.Sprintf("%05d", 7*i%(2*rowsMax+1)), used{calls: 1})
	}
	must(t, m.Fold(t.Context()))
	var rows []int
	var keys []string
	for _, f := range d.folds {
		rows = append(rows, len(f.rows))
		for _, r := range f.rows {
			keys = append(keys, r.Key)
		}
	}
	if !slices.Equal(rows, []int{rowsMax, rowsMax, 1}) || !slices.IsSorted(keys) {
		t.Errorf("folds have %v rows, in the order of their keys: %t", rows, slices.IsSorted(keys))
	}
}

// What comes during a fold waits for the next one: under load folds would have no pause.
func TestAFoldLeavesWhatComesDuringItToTheNext(t *testing.T) {
	d := &database{}
	m := newMeter(d)
	m.Add("f", used{calls: 1})
	d.fail = func(sent) error {
		if len(d.folds) < 100 {
			m.Add("f", used{calls: 1})
		}
		return nil
	}
	must(t, m.Fold(t.Context()))
	if len(d.folds) != 1 {
		t.Errorf("%d statements in one fold of one row, want 1", len(d.folds))
	}
	d.fail = nil
	must(t, m.Fold(t.Context()))
	must(t, m.Fold(t.Context()))
	if got := d.totals["f"]; got.calls != 2 || len(d.folds) != 2 {
		t.Errorf("%d calls are counted by %d statements, want 2 by 2", got.calls, len(d.folds))
	}
}

// A fold without an answer is sent again as it was, also by another incarnation of its node: whether or not the database
// has added it, it counts once.
func TestAFoldWithoutAnAnswerCountsOnce(t *testing.T) {
	for name, added := range map[string]bool{"added": true, "not added": false} {
		t.Run(name, func(t *testing.T) {
			d := &database{node: 1}
			m := newMeter(d)
			d.fail = func(f sent) error {
				if added {
					d.fail = nil
					_, err := d.fold(t.Context(), f)
					must(t, err)
					d.folds = d.folds[1:] // it was sent once
				}
				return errAway
			}
			m.Add("f", used{calls: 1})
			if err := m.Fold(t.Context()); !errors.Is(err, errAway) {
				t.Errorf("a fold without an answer returned %v", err)
			}
			d.fail, d.node = nil, 2
			m.Add("f", used{calls: 2})
			must(t, m.Fold(t.Context()))
			if len(d.folds) != 3 || d.folds[1].node != 1 || d.folds[1].seq != d.folds[0].seq || d.folds[2].node != 2 ||
				d.folds[2].seq <= d.folds[1].seq {
				t.Errorf("sent %+v, want the first fold again, and then another of the new incarnation", d.folds)
			}
			if n := d.totals["f"].calls; n != 3 {
				t.Errorf("%d calls are counted, want 3", n)
			}
		})
	}
}

// Use that the database refuses takes no other use with it, keeps no later use back, and is sent no more.
func TestRefusedUseIsDroppedAlone(t *testing.T) {
	d := &database{fail: func(f sent) error {
		if slices.ContainsFunc(f.rows, func(r Row[string, used]) bool { return r.Key == "evil" }) {
			return errRefused
		}
		return nil
	}}
	m := newMeter(d)
	for range 2 {
		m.Add("evil", used{calls: 1})
		for i := range 9 {
			m.Add(fmt.Sprint("honest", i), used{calls: 1})
			m.Add(fmt.Sprint("a", i), used{calls: 1})
		}
		must(t, m.Fold(t.Context()))
	}
	honest := 0
	for _, u := range d.totals {
		honest += u.calls
	}
	if n := d.totals["evil"].calls; n != 0 || honest != 36 {
		t.Errorf("%d calls of other flows are counted, want 36, and %d that were refused", honest-n, n)
	}
	before := len(d.folds)
	must(t, m.Fold(t.Context()))
	if n := len(d.folds) - before; n > 0 {
		t.Errorf("%d statements after the refused row was dropped, want none", n)
	}
}

// Calls of less than a millisecond come to their time, however often it is folded, but for the parts of an hour that is
// over.
func TestTimesBelowAMillisecondAddUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &database{}
		m := newMeter(d)
		half := used{calls: 1, time: 500 * time.Microsecond}
		for range 7 {
			m.Add("f", half)
			must(t, m.Fold(t.Context()))
		}
		for _, f := range d.folds {
			if part := f.rows[0].Used.time % time.Millisecond; part != 0 {
				t.Fatalf("a fold has %s beyond whole milliseconds", part)
			}
		}
		if got := d.totals["f"]; got.calls != 7 || got.time != 3*time.Millisecond {
			t.Errorf("7 calls of 0.5 ms are %d of %s, want 3 ms and half of one for the next", got.calls, got.time)
		}
		time.Sleep(time.Hour)
		for range 3 {
			m.Add("f", half)
			must(t, m.Fold(t.Context()))
		}
		if got := d.totals["f"].time; got != 4*time.Millisecond {
			t.Errorf("three more in the next hour: %s in all, want 4 ms", got)
		}
	})
}

// Budgets are read by the database's clock: the answer to each fold has its time.
func TestUseIsCountedToTheHourOfTheDatabase(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &database{ahead: 100 * time.Hour}
		m := newMeter(d)
		want := func(ahead time.Duration) {
			t.Helper()
			if got := m.Hour(); !got.Equal(time.Now().Add(ahead).UTC().Truncate(time.Hour)) {
				t.Errorf("the hour is %s at %s", got, time.Now())
			}
		}
		want(0)
		ctx, end := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- m.Run(ctx) }()
		synctest.Wait()
		want(100 * time.Hour)
		d.ahead = 50 * time.Hour
		m.Add("f", used{calls: 1})
		time.Sleep(time.Second)
		synctest.Wait()
		want(50 * time.Hour)
		end()
		must(t, <-ended)
	})
}

// The end of a node folds what is left. It does not wait for a database that does not answer, and neither does a fold
// before it.
func TestTheLastFoldIsAtTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &database{}
		m := newMeter(d)
		run := func() (end func() (took time.Duration, err error)) {
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error)
			go func() { ended <- m.Run(ctx) }()
			return func() (time.Duration, error) {
				began := time.Now()
				cancel()
				err := <-ended
				return time.Since(began), err
			}
		}
		end := run()
		m.Add("f", used{calls: 1})
		_, err := end()
		if must(t, err); d.totals["f"].calls != 1 {
			t.Error("use is not counted at the end")
		}

		var waited []time.Duration
		m.cfg.Send = func(
			ctx context.Context, _ postgres.DB, _ invalidation.NodeID, _ int64, _ []Row[string, used],
		) (time.Time, error) {
			began := time.Now()
			<-ctx.Done()
			waited = append(waited, time.Since(began))
			return time.Time{}, ctx.Err()
		}
		m.Add("f", used{calls: 1})
		end = run()
		time.Sleep(6500 * time.Millisecond) // a second, a try to send, and a part of the next one
		took, err := end()
		if !slices.Equal(waited[:1], []time.Duration{sendMax}) || took != m.cfg.EndMax || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("folds without an answer took %v, and the end %s: %v", waited, took, err)
		}
	})
}
