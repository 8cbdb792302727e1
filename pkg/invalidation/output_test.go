package invalidation

import (
	"errors"
	"strings"
	"testing"
)

func TestOutputIsFencedAndReadFromWhereAReaderStands(t *testing.T) {
	b := newBed(t, Config{})
	b.push("")
	run := func() *Run {
		l := b.claimOne()
		return &Run{Queue: b.q, Entry: l.Entries[0], Lock: l, Node: here}
	}
	first := run()
	for seq, data := range []string{"a", "b", "b"} { // the last one again, as after a lost answer
		if err := first.AppendOutput(b.ctx, min(seq+1, 2), []byte(data)); err != nil {
			t.Fatal(err)
		}
	}
	b.settle(last(Release(first.Lock, first.Entry.ID, 0)))
	if err := first.AppendOutput(b.ctx, 3, make([]byte, OutputBytesMax+1)); !errors.Is(err, ErrPayloadTooLarge) || !strings.Contains(err.Error(), "data of piece 3") {
		t.Errorf("a piece that is too large: %v", err)
	}
	if err := first.AppendOutput(b.ctx, 3, []byte("late")); !errors.Is(err, ErrLockLost) {
		t.Errorf("output after the lock was lost: %v, want ErrLockLost", err)
	}
	second := run()
	if err := second.AppendOutput(b.ctx, 1, []byte("anew")); err != nil {
		t.Fatal(err)
	}
	pieces, err := b.q.Output(b.ctx, first.Entry.ID, first.Lock.Token, 1, 10)
	if err != nil || len(pieces) != 2 || string(pieces[0].Data) != "b" || string(pieces[1].Data) != "anew" || pieces[1].Token != second.Lock.Token {
		t.Errorf("behind the first piece stand %+v (%v)", pieces, err)
	}
	if n := b.count(`SELECT penstock.sweep_output(100)`); n != 0 {
		t.Errorf("%d pieces of an entry that is still there were swept", n)
	}
}
