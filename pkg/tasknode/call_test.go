package tasknode

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/codes"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/penstock/penstock/pkg/invalidation"
)

// told is an Observer that keeps the errors of runs.
type told struct {
	noObserver
	errs []error
	ran  time.Duration
}

func (o *told) Ran(_ string, _, ran time.Duration, err error) {
	o.errs, o.ran = append(o.errs, err), o.ran+ran
}

// The time in the handler adds up to that in which threads were in it, and a snooze is no error.
func TestEntriesThatRunTogetherShareTheTimeOfTheRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		observer := &told{}
		n := New(Config{Observer: observer, Log: slog.New(slog.DiscardHandler)}, nil, nil)
		n.runs = t.Context()
		job := assigned(1, 2, 3, 4)
		job.handler = batchFunc(func(context.Context, []*invalidation.Run) []invalidation.BatchAnswer {
			time.Sleep(time.Second)
			return []invalidation.BatchAnswer{{}, {Err: invalidation.Snooze(time.Minute)}, {Err: errors.New("no such address")}, {}}
		})
		n.jobs.add(job)
		n.process(job)
		if observer.ran != time.Second {
			t.Errorf("a run of a second is observed as %v", observer.ran)
		}
		if e := observer.errs; len(e) != 4 || e[1] != nil || e[2] == nil {
			t.Errorf("the observer was told %v", e)
		}
	})
}

// Metrics, traces and counters have the errors of entries that run together, as they have those of one that runs alone.
func TestErrorsOfEntriesThatRunTogetherAreCounted(t *testing.T) {
	bad := errors.New("no such address")
	answers := map[string]struct {
		answer func() []invalidation.BatchAnswer
		errs   []string
	}{
		"none":    {func() []invalidation.BatchAnswer { return make([]invalidation.BatchAnswer, 3) }, []string{"", "", ""}},
		"one":     {func() []invalidation.BatchAnswer { return []invalidation.BatchAnswer{{}, {Err: bad}, {}} }, []string{"", "no such address", ""}},
		"too few": {func() []invalidation.BatchAnswer { return []invalidation.BatchAnswer{{}} }, slices.Repeat([]string{"handler answered 1 of 3 entries"}, 3)},
		"a panic": {func() []invalidation.BatchAnswer { panic("odd") }, slices.Repeat([]string{"handler panicked: odd"}, 3)},
		"unusable": {func() []invalidation.BatchAnswer {
			return []invalidation.BatchAnswer{{}, {}, {Err: (*unreadable)(nil)}}
		}, []string{"", "", "handler panicked: nil"}},
	}
	for name, c := range answers {
		t.Run(name, func(t *testing.T) {
			observer, exporter := &told{}, tracetest.NewInMemoryExporter()
			tracer := sdk.NewTracerProvider(sdk.WithSyncer(exporter)).Tracer("test")
			n := New(Config{Observer: observer, Tracer: tracer, Log: slog.New(slog.DiscardHandler)}, nil, nil)
			n.runs = t.Context()
			job := assigned(1, 2, 3)
			job.traced = &traced{}
			job.handler = batchFunc(func(context.Context, []*invalidation.Run) []invalidation.BatchAnswer { return c.answer() })
			n.jobs.add(job)
			n.process(job)
			var errs []string
			for _, err := range observer.errs {
				if err == nil {
					err = errors.New("")
				}
				errs = append(errs, fmt.Sprint(err))
			}
			if !slices.Equal(errs, c.errs) {
				t.Errorf("the observer was told %q, want %q", errs, c.errs)
			}
			failed := name != "none"
			if n.Stats().Runs.Load() != 1 || (n.Stats().RunErrors.Load() == 1) != failed {
				t.Errorf("%d of %d runs failed by the counters, want one run (failed: %v)", n.Stats().RunErrors.Load(), n.Stats().Runs.Load(), failed)
			}
			if spans := exporter.GetSpans(); len(spans) != 1 || (spans[0].Status.Code == codes.Error) != failed {
				t.Errorf("spans %+v, want one (failed: %v)", spans, failed)
			}
		})
	}
}

// unreadable is an error whose methods panic where the pointer is nil.
type unreadable struct{ text *string }

func (e *unreadable) Error() string {
	if e == nil {
		panic("nil")
	}
	return *e.text
}
