package invalidation

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

type thumbnail struct {
	Image string `json:"image"`
	Width int    `json:"width"`
}

func TestSyncMakesWhatIsMissingOnce(t *testing.T) {
	pool := openPool(t)
	thumbs := Definition[thumbnail]{Name: "thumbs", Config: Config{Grouping: "image", MaxConcurrent: 5}}
	mails := Definition[string]{Name: "mails"}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if err := Sync(t.Context(), pool, thumbs, mails); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	q, err := thumbs.Open(t.Context(), pool)
	if err != nil || q.Config.Grouping != "image" || q.Config.MaxConcurrent != 5 {
		t.Fatalf("queue is %+v (%v)", q, err)
	}
}

func TestSyncNamesEachFieldThatConflicts(t *testing.T) {
	pool := openPool(t)
	before := Definition[thumbnail]{Name: "thumbs", Config: Config{Grouping: "image", Mergeable: true}}
	if err := Sync(t.Context(), pool, before); err != nil {
		t.Fatal(err)
	}
	after := Definition[thumbnail]{Name: "thumbs", Config: Config{Kind: KindBatch, Grouping: "width", Mergeable: true, Merge: "first"}}
	err := Sync(t.Context(), pool, after)
	if !errors.Is(err, ErrDefinitionConflict) {
		t.Fatalf("error is %v, want ErrDefinitionConflict", err)
	}
	for _, want := range []string{
		`queue "thumbs": kind is "batch" in the code and "task" in the registry`,
		`grouping is "width" in the code and "image" in the registry`, `merge is "first" in the code and "last" in the registry`,
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error does not say %s:\n%v", want, err)
		}
	}
	after = Definition[thumbnail]{Name: "thumbs", Config: Config{Grouping: "image"}}
	if err := Sync(t.Context(), pool, after); err == nil || !strings.Contains(err.Error(), "mergeable is false in the code and true") {
		t.Errorf("error is %v, want one about mergeable", err)
	}
}

func TestSyncNamesConflictsBesideAnErrorOfAnotherQueue(t *testing.T) {
	pool := openPool(t)
	if err := Sync(t.Context(), pool, Definition[int]{Name: "works"}); err != nil {
		t.Fatal(err)
	}
	err := Sync(t.Context(), pool, Definition[int]{Name: "works", Config: Config{Kind: KindBatch}}, Definition[int]{Name: "Not A Name"},
		Definition[int]{Name: "works", Config: Config{Grouping: "a"}})
	if !errors.Is(err, ErrDefinitionConflict) || !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "grouping") {
		t.Errorf("error is %v, want both conflicts and that of the name", err)
	}
}

func TestSyncLeavesWhatOperatorsTune(t *testing.T) {
	pool := openPool(t)
	d := Definition[thumbnail]{Name: "thumbs", Config: Config{MaxConcurrent: 5, RunTimeout: time.Minute}}
	if err := Sync(t.Context(), pool, d); err != nil {
		t.Fatal(err)
	}
	if _, err := Alter(t.Context(), pool, "thumbs", map[string]any{"max_concurrent": 50, "run_timeout": "1 hour"}); err != nil {
		t.Fatal(err)
	}
	if err := Sync(t.Context(), pool, d); err != nil {
		t.Fatal(err)
	}
	if q, err := d.Open(t.Context(), pool); err != nil || q.Config.MaxConcurrent != 50 || q.Config.RunTimeout != time.Hour {
		t.Errorf("settings are %+v (%v), want the operator's", q.Config, err)
	}
}

func TestTypedPushReachesATypedHandler(t *testing.T) {
	b := newBed(t, Config{Grouping: "image"})
	d := Definition[thumbnail]{Name: "work", Config: Config{Grouping: "image"}}
	if _, err := d.Push(b.ctx, b.pool, thumbnail{"a.png", 10}, thumbnail{"a.png", 20}); err != nil {
		t.Fatal(err)
	}
	late, err := d.NewPush(thumbnail{"b.png", 30}, Push{Name: "late"})
	if err != nil {
		t.Fatal(err)
	}
	b.pushAll(b.pool, late)
	h := d.Handler(func(_ context.Context, r *Run, p thumbnail) (any, error) {
		return map[string]any{"area": p.Width * p.Width, "name": r.Entry.Name}, nil
	})
	for i, l := range b.claim(9) {
		want := []string{`{"area":100,"name":""}`, `{"area":900,"name":"late"}`}[i]
		run := &Run{Queue: b.q, Entry: l.Entries[0], Lock: l, Node: here}
		if got, err := h.Handle(b.ctx, run); err != nil || string(got) != want {
			t.Errorf("handled to %s (%v), want %s", got, err, want)
		}
		b.settle(doneAll(l)...)
	}
}

func TestAPayloadThatDoesNotFitIsAFailureAtOnce(t *testing.T) {
	h := Definition[thumbnail]{Name: "work"}.Handler(func(context.Context, *Run, thumbnail) (any, error) { return nil, nil })
	r := &Run{Queue: &Queue{}, Entry: Entry{ID: 7, Payload: []byte(`{"width": "wide"}`)}, Lock: &Lock{Key: "#7"}}
	result, err := h.Handle(t.Context(), r)
	if e := Judge(r, result, err, 0, 0); !e.Failed() || e.failure.Class != "payload" {
		t.Errorf("judged %+v after %v, want a failure of class payload", e, err)
	}
}

func TestMergedEntriesAreHandledOnceAndAllAnswered(t *testing.T) {
	d := Definition[thumbnail]{Name: "work", Merge: func(all []thumbnail) thumbnail { return all[len(all)-1] }}
	calls := 0
	h, ok := d.Handler(func(_ context.Context, _ *Run, p thumbnail) (any, error) {
		calls++
		return p.Width, nil
	}).(BatchHandler)
	if !ok {
		t.Fatal("a definition with Merge should take entries as batches")
	}
	var runs []*Run
	for _, payload := range []string{`{"width": 1}`, `"bad"`, `{"width": 3}`} {
		runs = append(runs, &Run{Queue: &Queue{}, Entry: Entry{Payload: []byte(payload)}, Lock: &Lock{Key: "K"}})
	}
	answers := h.HandleBatch(t.Context(), runs)
	if calls != 1 || string(answers[0].Result) != "3" || answers[1].Err == nil || string(answers[2].Result) != "3" {
		t.Errorf("%d calls, answers %+v", calls, answers)
	}
}

// What would be left behind would run again with an older payload than the one whose effects are committed.
func TestFinishTxOfMergedEntriesEndsAllThatWereMerged(t *testing.T) {
	b := newBed(t, Config{Grouping: "image"})
	d := Definition[thumbnail]{
		Name: "work", Config: Config{Grouping: "image"},
		Merge: func(all []thumbnail) thumbnail { return all[len(all)-1] },
	}
	if _, err := d.Push(b.ctx, b.pool, thumbnail{"a", 1}, thumbnail{"a", 2}, thumbnail{"a", 3}); err != nil {
		t.Fatal(err)
	}
	h, ok := d.Handler(func(ctx context.Context, r *Run, _ thumbnail) (any, error) {
		return nil, pgx.BeginFunc(ctx, b.pool, func(tx pgx.Tx) error { return r.FinishTx(ctx, tx, nil) })
	}).(BatchHandler)
	if !ok {
		t.Fatal("a definition with Merge should take entries as batches")
	}
	l := b.claimOne()
	var runs []*Run
	for _, e := range l.Entries {
		runs = append(runs, &Run{Queue: b.q, Entry: e, Lock: l, Node: here})
	}
	for i, a := range h.HandleBatch(b.ctx, runs) {
		if a.Err != nil {
			t.Errorf("entry %d: %v", i, a.Err)
		}
	}
	if n := b.count(`SELECT count(*) FROM penstock.entry`); len(runs) != 3 || n != 0 {
		t.Errorf("%d of %d merged entries are left after the commit of FinishTx, want 0 of 3", n, len(runs))
	}
	b.settle(doneAll(l)...)
}

func TestCompactionMergesAsTheDefinitionSays(t *testing.T) {
	pool := openPool(t)
	d := Definition[thumbnail]{
		Name:   "thumbs",
		Config: Config{Grouping: "image", Mergeable: true},
		Merge: func(all []thumbnail) thumbnail {
			sum := all[0]
			for _, one := range all[1:] {
				sum.Width += one.Width
			}
			return sum
		},
	}
	if err := Sync(t.Context(), pool, d); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Push(t.Context(), pool, thumbnail{"a", 1}, thumbnail{"b", 10}, thumbnail{"a", 2}, thumbnail{"a", 4}); err != nil {
		t.Fatal(err)
	}
	n, err := d.Compact(t.Context(), pool, "a")
	if err != nil {
		t.Fatal(err)
	}
	var left string
	if err := pool.QueryRow(t.Context(), `SELECT string_agg(payload->>'width', ' ' ORDER BY lock_key) FROM penstock.entry`).Scan(&left); err != nil || left != "7 10" {
		t.Errorf("compaction replaced %d and left widths %s (%v), want 7 and 10", n, left, err)
	}
}
