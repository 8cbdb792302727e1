package scale

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/penstock/penstock/internal/duty"
)

// buggy is a backend with a bug.
type buggy struct {
	cluster
	lists bool
}

func (c *buggy) List(ctx context.Context, d BackendTarget) ([]BackendInstance, error) {
	if c.lists {
		panic("a list of nothing")
	}
	return c.cluster.List(ctx, d)
}

// buggyWatch is a backend whose watch has a bug.
type buggyWatch struct{ buggy }

func (*buggyWatch) Watch(context.Context, func(model string)) { panic("an event of nothing") }

// A panic is recovered by its own goroutine alone: without that it would end the process of the leader, and of each
// leader after it.
func TestAPanicOfABackendEndsNoProcess(t *testing.T) {
	db := driven(t)
	t.Run("in a round", func(t *testing.T) {
		c := &buggy{lists: true}
		a := newApplier(product(t, db), free{db}, Config{Backends: map[string]Backend{backendLocal: c}}.withDefaults())
		rounds := func() {
			t.Helper()
			var calls sync.WaitGroup
			if err := a.startRounds(t.Context(), &calls, nil); err != nil {
				t.Fatal(err)
			}
			calls.Wait()
		}
		rounds()
		if text := one[string](t, db, `SELECT error FROM penstock.deployment_state`); !strings.Contains(text, "a list of nothing") {
			t.Errorf("the error of the deployment is %q", text)
		}
		if n := a.figures().Failed; n != 1 {
			t.Errorf("%d rounds failed, want 1", n)
		}
		c.lists = false
		rounds()
		if !one[bool](t, db, `SELECT seen_at IS NOT NULL AND error IS NULL FROM penstock.deployment_state`) {
			t.Error("no round came after the one that panicked")
		}
	})
	t.Run("in a watch", func(t *testing.T) {
		a := newApplier(product(t, db), free{db}, Config{Backends: map[string]Backend{backendLocal: &buggyWatch{}}}.withDefaults())
		if err := a.run(t.Context()); !errors.Is(err, duty.ErrPanic) {
			t.Errorf("the applier ended with %v", err)
		}
	})
}
