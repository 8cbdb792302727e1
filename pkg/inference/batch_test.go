package inference

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func member(entry, shape string, tokens int64, at time.Time) Member {
	return Member{Entry: entry, Shape: shape, Tokens: tokens, Bytes: 10 * tokens, At: at}
}

func entries(batch []Member) []string {
	var names []string
	for _, m := range batch {
		names = append(names, m.Entry)
	}
	return names
}

func TestBatchLeavesWhenItsOldestMemberHasWaited(t *testing.T) {
	now := clock()
	f := NewFormer(BatchLimits{Items: 4, Wait: Seconds(100 * time.Millisecond)})
	f.Add(member("a", "s", 1, now))
	f.Add(member("b", "s", 1, now.Add(90*time.Millisecond)))
	if at, waiting := f.Next(); !waiting || !at.Equal(now.Add(100*time.Millisecond)) {
		t.Errorf("next batch at %v, want 100 ms after the oldest member", at)
	}
	if _, due := f.Take(now.Add(99*time.Millisecond), false); due {
		t.Error("batch left early though no slot was idle")
	}
	batch, due := f.Take(now.Add(100*time.Millisecond), false)
	if !due || !slices.Equal(entries(batch), []string{"a", "b"}) {
		t.Errorf("got %v", entries(batch))
	}
	if _, waiting := f.Next(); waiting || f.Len() != 0 {
		t.Error("something was left behind")
	}
}

func TestBatchLeavesAtOnceForAnIdleSlot(t *testing.T) {
	now := clock()
	f := NewFormer(BatchLimits{Items: 4})
	f.Add(member("a", "wide", 1, now.Add(time.Millisecond)))
	f.Add(member("b", "tall", 1, now))
	for _, want := range []string{"b", "a"} { // the oldest first
		batch, due := f.Take(now.Add(2*time.Millisecond), true)
		if !due || !slices.Equal(entries(batch), []string{want}) {
			t.Errorf("got %v, want %s", entries(batch), want)
		}
	}
	if _, due := f.Take(now, true); due {
		t.Error("a batch of nobody")
	}
}

func TestBatchLeavesWhenFull(t *testing.T) {
	now := clock()
	for _, c := range []struct {
		name   string
		limits BatchLimits
		first  int // members in the first batch out of 3 of 10 tokens and 100 bytes
	}{
		{"items", BatchLimits{Items: 2}, 2},
		{"tokens", BatchLimits{Items: 9, Tokens: 25}, 2},
		{"tokens reached exactly", BatchLimits{Items: 9, Tokens: 20}, 2},
		{"bytes", BatchLimits{Items: 9, Bytes: 150}, 1},
		{"no batches", BatchLimits{}, 1},
	} {
		f := NewFormer(c.limits)
		var first []Member
		for i := range 3 {
			if batch, complete := f.Add(member(fmt.Sprint(i), "s", 10, now)); complete && first == nil {
				first = batch
			}
		}
		if len(first) != c.first {
			t.Errorf("%s: first batch has %d members, want %d", c.name, len(first), c.first)
		}
	}
}

func TestOversizedMemberTravelsAlone(t *testing.T) {
	now := clock()
	f := NewFormer(BatchLimits{Items: 4, Tokens: 10})
	f.Add(member("small", "s", 1, now))
	first, _ := f.Add(member("huge", "s", 99, now))
	second, due := f.Take(now, false)
	if !slices.Equal(entries(first), []string{"small"}) || !due || !slices.Equal(entries(second), []string{"huge"}) {
		t.Errorf("got %v then %v", entries(first), entries(second))
	}
}

func TestWithdrawnMemberIsNotSent(t *testing.T) {
	now := clock()
	f := NewFormer(BatchLimits{Items: 3})
	f.Add(member("a", "s", 1, now))
	f.Add(member("b", "s", 1, now))
	if !f.Withdraw("a") || f.Withdraw("a") || !f.Withdraw("b") {
		t.Error("withdrawing is not exact")
	}
	if f.Len() != 0 {
		t.Error("an empty batch stayed")
	}
}

// Nobody is lost or sent twice, limits hold, shapes do not mix and keep their
// order, and nobody waits longer than the limit once Take is called when Next
// says so.
func TestBatchProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limits := BatchLimits{
			Items: rapid.IntRange(0, 5).Draw(t, "items"), Tokens: rapid.Int64Range(0, 20).Draw(t, "tokens"),
			Bytes: rapid.Int64Range(0, 200).Draw(t, "bytes"), Wait: Seconds(50 * time.Millisecond),
		}
		f, now := NewFormer(limits), clock()
		added, sent, lastOfShape := 0, map[string]bool{}, map[string]int{}
		check := func(batch []Member) {
			var tokens, bytes int64
			for _, m := range batch {
				if sent[m.Entry] {
					t.Fatalf("%s sent twice", m.Entry)
				}
				sent[m.Entry] = true
				if m.Shape != batch[0].Shape {
					t.Fatal("shapes mixed")
				}
				var number int
				if _, err := fmt.Sscan(m.Entry, &number); err != nil {
					t.Fatal(err)
				}
				if number <= lastOfShape[m.Shape] {
					t.Fatalf("%s overtook %d", m.Entry, lastOfShape[m.Shape])
				}
				lastOfShape[m.Shape] = number
				if waited := now.Sub(m.At); waited > limits.Wait.Duration() {
					t.Fatalf("%s waited %s", m.Entry, waited)
				}
				tokens, bytes = tokens+m.Tokens, bytes+m.Bytes
			}
			if len(batch) > 1 && (len(batch) > limits.Items || !within(tokens, limits.Tokens) || !within(bytes, limits.Bytes)) {
				t.Fatalf("batch of %d, %d tokens, %d bytes exceeds %+v", len(batch), tokens, bytes, limits)
			}
		}
		advance := func(to time.Time) {
			for {
				at, waiting := f.Next()
				if !waiting || at.After(to) {
					now = to
					return
				}
				now = at
				if batch, due := f.Take(now, false); due {
					check(batch)
				} else {
					t.Fatal("Next promised a batch that Take did not give")
				}
			}
		}
		for range rapid.IntRange(0, 100).Draw(t, "steps") {
			advance(now.Add(time.Duration(rapid.IntRange(0, 30).Draw(t, "pause")) * time.Millisecond))
			added++
			m := member(fmt.Sprint(added), rapid.SampledFrom([]string{"x", "y"}).Draw(t, "shape"), rapid.Int64Range(0, 25).Draw(t, "size"), now)
			if batch, complete := f.Add(m); complete {
				check(batch)
			}
		}
		for f.Len() > 0 {
			if batch, due := f.Take(now, true); due {
				check(batch)
			}
		}
		if len(sent) != added {
			t.Fatalf("%d added, %d sent", added, len(sent))
		}
	})
}
