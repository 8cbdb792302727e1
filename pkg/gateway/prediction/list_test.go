package prediction

import (
	"errors"
	"slices"
	"testing"

	"github.com/penstock/penstock/internal/pgtest"
)

// A page has as many predictions as fit into its bytes, and at least one.
func TestPagesAreBoundedInBytes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		stored []int
		want   int
	}{
		{nil, 0},
		{[]int{10, 10}, 2},
		{[]int{pageBytesMax + 1}, 1},
		{[]int{pageBytesMax + 1, 1}, 1},
		{[]int{pageBytesMax - 5, 5, 1}, 2},
	} {
		list := make([]listed, len(c.stored))
		for i, n := range c.stored {
			list[i].Stored = n
		}
		if got := fitting(list); got != c.want {
			t.Errorf("%v: %d are in the page, want %d", c.stored, got, c.want)
		}
	}
}

// A page begins where the one before ended, though the last prediction of that is gone.
func TestAListGoesOnBehindAPredictionThatIsGone(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	for _, sql := range []string{
		`SELECT penstock.create_queue('q'), penstock.push('q', '{}')`,
		`INSERT INTO penstock.prediction (id, owner, entry_id, queue_id, model, version, input, created_at)
		 SELECT v.id, v.owner, e.id, e.queue_id, 'm', 'm', '{}', timestamptz '2026-11-30 12:00:00.000001 UTC' - age
		   FROM penstock.entry e, (VALUES ('a', 'ada', interval '0'), ('c', 'ada', '1 us'), ('b', 'ada', '1 us'), ('d', 'ada', '1 day'),
		                                  ('e', 'bob', '1 hour')) v(id, owner, age)`,
	} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	for behind, more := (cursor{}), true; more && len(got) < 9; more = behind.ID != "" {
		rows, next, err := page(t.Context(), pool, "ada", behind, 1)
		if err != nil || len(rows) != 1 {
			t.Fatalf("%d rows behind %q: %v", len(rows), behind, err)
		}
		if got = append(got, rows[0].ID); next.ID != "" && next.ID != rows[0].ID {
			t.Errorf("behind %q comes a page behind %q: gateways of versions before take the id alone", rows[0].ID, next)
		}
		if next.ID != "" { // as a gateway of a version before gives it
			old, _, err := page(t.Context(), pool, "ada", cursor{ID: next.ID}, 1)
			want, _, _ := page(t.Context(), pool, "ada", next, 1)
			if err != nil || len(old) != 1 || len(want) != 1 || old[0].ID != want[0].ID {
				t.Errorf("behind the id %q are %v, want %v: %v", next.ID, old, want, err)
			}
		}
		behind = next
		if _, err := pool.Exec(t.Context(), `DELETE FROM penstock.prediction WHERE id = $1`, rows[0].ID); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(got, []string{"a", "c", "b", "d"}) {
		t.Errorf("the list was %v, want a, c, b, d", got)
	}
	for _, behind := range []cursor{{ID: "a"}, {ID: "e"}, {ID: "a", Before: "x"}, {Before: "2026-11-30T12:00:00Z"}} {
		if _, _, err := page(t.Context(), pool, "ada", behind, 1); !errors.Is(err, errCursor) {
			t.Errorf("cursor %q: %v, want errCursor", behind, err)
		}
	}
}
