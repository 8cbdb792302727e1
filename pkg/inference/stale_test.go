package inference

import (
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

const grace = 5 * time.Second

func TestStaleSlots(t *testing.T) {
	old, young := 30*time.Second, time.Second
	for _, c := range []struct {
		name   string
		held   []HeldSlot
		active int
		want   []string
	}{
		{"worker restarted", []HeldSlot{{"a", old, false}, {"b", old + 1, false}}, 0, []string{"b", "a"}},
		{"all accounted for", []HeldSlot{{"a", old, false}, {"b", old, false}}, 2, nil},
		{"more than ours", []HeldSlot{{"a", old, false}}, 5, nil},
		{"one left over, the oldest", []HeldSlot{{"a", old, false}, {"b", 2 * old, false}}, 1, []string{"b"}},
		{"a live connection is proof enough", []HeldSlot{{"a", old, true}, {"b", old, false}}, 0, []string{"b"}},
		// The race: the probe overtook the request that the new slot was taken for.
		{"taken a moment ago", []HeldSlot{{"a", young, false}}, 0, nil},
		{"old one counted, new one on its way", []HeldSlot{{"old", old, false}, {"new", young, false}}, 1, nil},
		{"exactly at grace", []HeldSlot{{"a", grace, false}}, 0, []string{"a"}},
		{"nonsense report", []HeldSlot{{"a", young, false}}, -7, nil},
	} {
		if got := StaleSlots(c.held, c.active, grace); !slices.Equal(got, c.want) {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
}

// As long as requests take less than the grace age to arrive, no more slots are
// freed than are unused: calls in flight never exceed what is held.
func TestNoMoreSlotsAreFreedThanAreUnused(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var held []HeldSlot
		active, dead := 0, 0
		for i := range rapid.IntRange(0, 20).Draw(t, "slots") {
			slot := HeldSlot{ID: string(rune('a' + i)), HeldFor: time.Duration(rapid.Int64Range(0, int64(time.Minute)).Draw(t, "age"))}
			arrives := time.Duration(rapid.Int64Range(0, int64(grace)-1).Draw(t, "travel"))
			switch {
			case slot.HeldFor < arrives: // on its way
			case rapid.Bool().Draw(t, "running"):
				active++
			default:
				dead++
			}
			held = append(held, slot)
		}
		stale := StaleSlots(held, active, grace)
		if len(stale) > dead {
			t.Fatalf("%d slots freed, only %d were not in use", len(stale), dead)
		}
	})
}
