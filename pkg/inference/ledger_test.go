package inference

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/penstock/penstock/pkg/slot"
)

var everywhere = func(int32) bool { return true }

func assigned(l *slotLedger, now time.Time, affinity string, admit func(int32) bool) *heldSlot {
	h, _, _ := l.assign(now, slotRequest{affinity: affinity}, admit)
	return h
}

func TestPermitIsTakenBeforeItIsAssignedAndFreeOnlyWhenGivenBack(t *testing.T) {
	now := time.Now()
	l := newSlotLedger()
	l.add(slotAt(1, 0, 100), now)
	l.add(slotAt(1, 1, 101), now)
	if n := l.take(now, 5, everywhere); n != 2 {
		t.Fatalf("took %d permits of 2 slots", n)
	}
	if n := l.take(now, 1, everywhere); n != 0 {
		t.Fatal("a third permit was given out for two slots")
	}
	h := assigned(l, now, "", everywhere)
	l.finish(h, now, false)
	if n := l.take(now, 1, everywhere); n != 0 {
		t.Fatal("the slot was given out again while its permit is still held")
	}
	l.endPermits(2)
	if n := l.take(now, 5, everywhere); n != 2 {
		t.Fatalf("took %d permits after both were given back", n)
	}
}

// A share is read while the node holds slots. Once it has given all back, other nodes may have enough again: what it
// leases later is not bounded by that share until the next reading, which is up to a second away.
func TestAShareLastsNoLongerThanTheSlots(t *testing.T) {
	now := time.Now()
	l := newSlotLedger()
	l.add(slotAt(1, 0, 100), now)
	l.share = 1
	if n := len(l.surplus(now, 0, everywhere)); n != 1 {
		t.Fatalf("%d slots go back, want 1", n)
	}
	l.add(slotAt(1, 0, 101), now)
	l.add(slotAt(1, 1, 102), now)
	if n := l.take(now, 2, everywhere); n != 2 {
		t.Errorf("%d permits for 2 slots", n)
	}
}

func TestSlotInDoubtIsNotGivenOut(t *testing.T) {
	now := time.Now()
	l := newSlotLedger()
	l.add(slotAt(1, 0, 100), now)
	l.take(now, 1, everywhere)
	l.finish(assigned(l, now, "", everywhere), now, true)
	l.endPermits(1)
	if n := l.take(now, 1, everywhere); n != 0 {
		t.Fatal("a slot in doubt was given out")
	}
}

func TestEntriesGoToTheInstanceThatRanTheirLikeLast(t *testing.T) {
	now := time.Now()
	l := newSlotLedger()
	for number := range int32(4) {
		l.add(slotAt(1, number, int64(100+number)), now)
		l.add(slotAt(2, number, int64(200+number)), now)
	}
	l.take(now, 8, everywhere)
	a := assigned(l, now, "french", everywhere)
	if b := assigned(l, now, "german", func(i int32) bool { return i != a.Instance }); b.Instance == a.Instance {
		t.Fatal("assigned to an instance that was not admitted")
	}
	if c := assigned(l, now, "french", everywhere); c.Instance != a.Instance {
		t.Errorf("french went to instance %d, was loaded on %d", c.Instance, a.Instance)
	}
	if d := assigned(l, now, "", everywhere); d.Instance == a.Instance {
		t.Error("an entry without an affinity went to the busier instance")
	}
}

func TestInstanceThatShrankTakesNoCallsBeyondItsSlots(t *testing.T) {
	now := time.Now()
	l := newSlotLedger()
	for number := range int32(4) {
		l.add(slotAt(1, number, int64(100+number)), now)
	}
	l.take(now, 4, everywhere)
	var running []*heldSlot
	for range 3 {
		running = append(running, assigned(l, now, "", everywhere))
	}
	l.setLimit(1, 2)
	for _, h := range running {
		l.finish(h, now, false)
	}
	l.endPermits(4)
	if n := l.take(now, 4, everywhere); n != 2 {
		t.Errorf("took %d permits of an instance with 2 slots", n)
	}
	if home := l.surplus(now, time.Hour, everywhere); len(home) != 2 {
		t.Errorf("%d slots go home, want 2", len(home))
	}
}

func slotAt(instance, number int32, token int64) slot.Held {
	return slot.Held{Instance: instance, Number: number, Token: token}
}

// Whatever happens, permits and busy slots together never exceed what is held, except by slots that were lost under
// permits; and every slot comes home in the end.
func TestLedgerNeverGivesOutMoreThanItHolds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := time.Unix(0, 0)
		l := newSlotLedger()
		l.perSlot = rapid.IntRange(1, 4).Draw(t, "permits a slot")
		var busy []*heldSlot
		permits, onCalls, lost, next := 0, 0, 0, int64(1)
		t.Repeat(map[string]func(*rapid.T){
			"add": func(t *rapid.T) {
				s := slotAt(rapid.Int32Range(1, 3).Draw(t, "instance"), rapid.Int32Range(0, 4).Draw(t, "number"), next)
				if l.of(s.Instance).Numbered(s.Number) == nil {
					l.add(s, now)
					next++
				}
			},
			"take": func(t *rapid.T) { permits += l.take(now, rapid.IntRange(0, 6).Draw(t, "want"), everywhere) },
			"give back": func(t *rapid.T) {
				n := rapid.IntRange(0, max(0, permits-onCalls)).Draw(t, "n")
				l.endPermits(n)
				permits -= n
			},
			"assign": func(t *rapid.T) {
				if permits <= onCalls {
					return
				}
				a := slotRequest{affinity: rapid.SampledFrom([]string{"", "a", "b"}).Draw(t, "affinity"), permits: rapid.IntRange(1, min(l.perSlot, permits-onCalls)).Draw(t, "permits")}
				h, _, _ := l.assign(now, a, everywhere)
				if h != nil {
					busy, onCalls = append(busy, h), onCalls+a.permits
				} else if lost == 0 && l.perSlot == 1 { // with more, others may ride on the slot that stood for it
					t.Fatal("there was no slot for a permit")
				}
			},
			"finish": func(t *rapid.T) {
				if len(busy) == 0 {
					return
				}
				i := rapid.IntRange(0, len(busy)-1).Draw(t, "call")
				doubt := rapid.IntRange(0, 5).Draw(t, "doubt") == 0
				h := busy[i]
				onCalls -= h.Call.permits
				busy = append(busy[:i], busy[i+1:]...)
				l.finish(h, now, doubt)
				if doubt {
					lost++
				}
			},
			"dropPermit": func(*rapid.T) {
				if len(busy) > 0 && busy[0].Call.permits > 1 {
					l.dropPermit(busy[0])
					onCalls--
				}
			},
			"lose": func(t *rapid.T) {
				for _, s := range l.instances {
					for h := range s.All() {
						if rapid.IntRange(0, 9).Draw(t, "lose") == 0 {
							l.lose(h)
							lost++
						}
					}
				}
			},
			"tidy": func(t *rapid.T) {
				now = now.Add(time.Second)
				l.share = rapid.IntRange(-1, 4).Draw(t, "share")
				for _, s := range l.surplus(now, 3*time.Second, everywhere) {
					if i := l.instances[s.Instance]; i != nil && i.Find(s) != nil {
						t.Fatal("a slot in use was sent home")
					}
				}
			},
			"": func(t *rapid.T) {
				if l.unassigned != permits-onCalls {
					t.Fatalf("%d permits unassigned, want %d", l.unassigned, permits-onCalls)
				}
				if lost == 0 && permits > l.held()*l.perSlot {
					t.Fatalf("%d permits for %d slots", permits, l.held())
				}
			},
		})
	})
}
