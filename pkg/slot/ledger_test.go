package slot

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// The end of a call on a slot that was lost frees nothing, also where the slot has come in again and has another call.
func TestTheEndOfACallOnALostSlotFreesNothing(t *testing.T) {
	t.Parallel()
	var l Ledger[struct{}]
	first := l.Add(Held{Number: 0, Token: 7})
	l.Occupy(first)
	l.Drop(first)
	again := l.Add(Held{Number: 0, Token: 7})
	l.Occupy(again)
	if l.Free(first) || l.Drop(first) || l.Idle() != 0 || l.Busy() != 1 {
		t.Errorf("%d slots are idle and %d busy, want the one busy", l.Idle(), l.Busy())
	}
	if !l.Free(again) || l.Idle() != 1 {
		t.Error("the end of its own call frees it not")
	}
}

func TestANumberHasTheHolderWithTheGreatestToken(t *testing.T) {
	t.Parallel()
	var l Ledger[struct{}]
	old := l.Add(Held{Number: 3, Token: 7})
	fresh := l.Add(Held{Number: 3, Token: 8})
	if l.Has(old) || !l.Has(fresh) || l.Add(Held{Number: 3, Token: 7}) != nil || l.Add(Held{Number: 3, Token: 8}) != nil || l.Held() != 1 {
		t.Errorf("%d slots of one number", l.Held())
	}
}

// Whatever happens, each slot of the node is idle, busy, or leaves, and is in one of these alone.
func TestASlotIsIdleOrBusyOrLeaves(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var ledger Ledger[struct{}]
		var leaving Leaving
		now := time.Unix(1, 0)
		rows := map[Held]bool{} // of the database; true: in doubt
		var calls []*Leased[struct{}]
		var sentBack []Held
		token := int64(0)
		drop := func(t *rapid.T) (Held, bool) {
			for s := range ledger.All() {
				if !s.Busy() && rapid.Bool().Draw(t, "this one") {
					return s.Held, ledger.Drop(s)
				}
			}
			return Held{}, false
		}
		gone := func(s Held) {
			delete(rows, s)
		}
		t.Repeat(map[string]func(*rapid.T){
			"lease": func(t *rapid.T) {
				number := rapid.Int32Range(0, 4).Draw(t, "number")
				for s := range rows {
					if s.Number == number {
						return
					}
				}
				token++
				rows[Held{Number: number, Token: token}] = false
				if rapid.Bool().Draw(t, "answered") {
					ledger.Add(Held{Number: number, Token: token})
				}
			},
			"begin": func(*rapid.T) {
				if s := ledger.Last(); s != nil {
					ledger.Occupy(s)
					calls = append(calls, s)
				}
			},
			"end": func(t *rapid.T) {
				if len(calls) == 0 {
					return
				}
				s := calls[0]
				calls = calls[1:]
				if rapid.Bool().Draw(t, "doubt") && ledger.Drop(s) {
					leaving.Doubt(Doubt{Held: s.Held})
				} else {
					ledger.Free(s)
				}
			},
			"give back": func(t *rapid.T) {
				if s, dropped := drop(t); dropped {
					leaving.GiveBack(s)
				}
			},
			"offer": func(t *rapid.T) {
				s, dropped := drop(t)
				if !dropped {
					return
				}
				leaving.Note(s)
				switch rapid.SampledFrom([]string{"taken", "kept", "no answer"}).Draw(t, "answer") {
				case "taken":
					gone(s)
					leaving.GaveBack(now, true, s)
				case "kept":
					leaving.Keep(s)
					ledger.Add(s)
				default:
					leaving.GaveBack(now, false, s)
				}
			},
			"send": func(t *rapid.T) {
				sentBack = append(sentBack, leaving.TakeBack()...)
				doubts := leaving.TakeDoubts()
				answered := rapid.Bool().Draw(t, "answered")
				for _, d := range doubts {
					if _, there := rows[d.Held]; there && answered {
						rows[d.Held] = true
					}
				}
				leaving.Doubted(now, answered, doubts...)
			},
			"answer": func(t *rapid.T) {
				if rapid.Bool().Draw(t, "carried out") {
					for _, s := range sentBack {
						gone(s)
					}
				}
				answered := rapid.Bool().Draw(t, "answered")
				if answered {
					for _, s := range sentBack {
						gone(s)
					}
				}
				leaving.GaveBack(now, answered, sentBack...)
				sentBack = nil
			},
			"compare": func(*rapid.T) {
				now = now.Add(time.Second)
				leaving.ForgetBefore(now)
				var ours []Held
				for s, doubt := range rows {
					if !doubt {
						ours = append(ours, s)
					}
				}
				for s := range ledger.All() {
					if _, there := rows[s.Held]; !there {
						ledger.Drop(s)
					}
				}
				for _, s := range leaving.Without(ours) {
					ledger.Add(s)
				}
			},
			"": func(t *rapid.T) {
				busy := 0
				for s := range ledger.All() {
					if s.Busy() {
						busy++
					}
					if doubt, there := rows[s.Held]; !there || doubt {
						t.Fatalf("%+v is used, and is not the node's", s.Held)
					}
					if leaving.Has(s.Held) {
						t.Fatalf("%+v is used, and leaves", s.Held)
					}
				}
				if busy != ledger.Busy() || ledger.Busy()+ledger.Idle() != ledger.Held() {
					t.Fatalf("%d are busy, counted %d, and %d idle of %d", busy, ledger.Busy(), ledger.Idle(), ledger.Held())
				}
				for _, s := range ledger.idle {
					if !ledger.Has(s) || s.Busy() {
						t.Fatalf("%+v is idle", s)
					}
				}
			},
		})
	})
}
