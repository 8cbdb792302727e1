package invalidation

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
)

// A queue that was dropped and made again is another one: what is done by the id of the handle must not go on with the
// one that is gone.
func TestAHandleIsReadAnewWhenItsTimeIsOver(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	exec := func(sql string) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	handles := NewHandles(pool, nil)
	over := func() {
		stored, _ := handles.byName.Load("q")
		known, _ := stored.(openHandle)
		handles.byName.Store("q", openHandle{known.Queue, time.Now().Add(-openFor)})
	}
	exec(`SELECT penstock.create_queue('q')`)
	first, err := handles.Get(t.Context(), "q")
	if err != nil {
		t.Fatal(err)
	}
	exec(`SELECT penstock.drop_queue('q', true, 'test')`)
	exec(`SELECT penstock.create_queue('q')`)
	over()
	second, err := handles.Get(t.Context(), "q")
	if err != nil || second.ID == first.ID {
		t.Fatalf("the handle is that of queue %d, which is gone: %v", first.ID, err)
	}
	exec(`SELECT penstock.drop_queue('q', true, 'test')`)
	over()
	if _, err := handles.Get(t.Context(), "q"); !errors.Is(err, ErrQueueNotFound) {
		t.Errorf("got %v, want ErrQueueNotFound", err)
	}
}

// A queue that was dropped is asked for no more: its handle, with the texts of its statements, would stay for ever.
func TestAHandleThatNobodyUsesIsForgotten(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	handles := NewHandles(pool, nil)
	for _, name := range []string{"dropped", "used", "fresh"} {
		if _, err := pool.Exec(t.Context(), `SELECT penstock.create_queue($1)`, name); err != nil {
			t.Fatal(err)
		}
	}
	get := func(name string) {
		t.Helper()
		if _, err := handles.Get(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	get("dropped")
	get("used")
	if _, err := pool.Exec(t.Context(), `SELECT penstock.drop_queue('dropped')`); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"dropped", "used"} { // both were opened long ago
		stored, _ := handles.byName.Load(name)
		known, _ := stored.(openHandle)
		handles.byName.Store(name, openHandle{known.Queue, time.Now().Add(-unusedFor)})
	}
	get("used")
	get("fresh")
	var left []string
	handles.byName.Range(func(name, _ any) bool {
		left = append(left, name.(string)) //nolint:errcheck,forcetypeassert // nothing else is stored
		return true
	})
	slices.Sort(left)
	if want := []string{"fresh", "used"}; !slices.Equal(left, want) {
		t.Errorf("the handles of %v are kept, want those of %v", left, want)
	}
}
