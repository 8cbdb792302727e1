package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"

	"github.com/penstock/penstock/pkg/operator"
)

func newTestTop(t *testing.T, read snapshotReader) *top {
	t.Helper()
	a := newApp(nil, &bytes.Buffer{}, &bytes.Buffer{}, os.Getenv)
	a.format, a.now = "table", func() time.Time { return noon }
	return newTop(t.Context(), a, read, 2*time.Second)
}

// press sends keys, and returns the command that the last one asked for.
func press(m *top, keys ...tea.KeyPressMsg) (cmd tea.Cmd) {
	for _, k := range keys {
		_, cmd = m.Update(k)
	}
	return cmd
}

func key(s string) tea.KeyPressMsg { return tea.KeyPressMsg{Text: s, Code: []rune(s)[0]} }

func TestTopReadsDrawsAndReadsAgain(t *testing.T) {
	m := newTestTop(t, func(context.Context, *operator.Snapshot) (*operator.Snapshot, error) { return snapshotNow(), nil })
	if !strings.Contains(m.View().Content, "reading") {
		t.Errorf("before the first snapshot: %s", m.View().Content)
	}
	_, next := m.Update(m.Init()())
	if next == nil {
		t.Error("nothing is asked for after a snapshot arrived")
	}
	if picture := m.View(); !picture.AltScreen || !strings.Contains(picture.Content, "embed") || !strings.Contains(picture.Content, "118.0") {
		t.Errorf("picture is\n%s", picture.Content)
	}
	if _, next = m.Update(due{}); next == nil {
		t.Fatal("nothing is read when it is due")
	}
	if _, arrivedAgain := next().(arrived); !arrivedAgain {
		t.Error("what is read when it is due is not a snapshot")
	}
}

func TestTopShowsEachPageAndOrder(t *testing.T) {
	m := newTestTop(t, nil)
	m.Update(arrived{snapshot: snapshotNow()})
	for page, says := range map[string]string{"1": "KIND", "2": "acme", "3": "THREADS", "4": "#17"} {
		press(m, key(page))
		if picture := m.draw(); !strings.Contains(picture, says) {
			t.Errorf("page %s does not say %q:\n%s", page, says, picture)
		}
	}
	press(m, key("1"))
	firsts := map[string]bool{}
	for range orders {
		picture := m.draw()
		rows := strings.Split(picture[strings.Index(picture, "QUEUE"):], "\n")
		firsts[orders[m.order].name+": "+strings.Fields(rows[1])[0]] = true
		press(m, key("s"))
	}
	for _, want := range []string{"head age: embed", "out/s: embed", "waiting: embed", "failed: mails", "name: embed"} {
		if !firsts[want] {
			t.Errorf("%s is not among the orders' first queues %v", want, firsts)
		}
	}
	if m.order != 0 {
		t.Errorf("order is %d after a whole round", m.order)
	}
}

func TestTopStaysWithinTheTerminalAndScrolls(t *testing.T) {
	m := newTestTop(t, nil)
	m.Update(arrived{snapshot: snapshotNow()})
	m.Update(tea.WindowSizeMsg{Width: 50, Height: 7})
	first := m.draw()
	lines := strings.Split(first, "\n")
	if len(lines) > 7 {
		t.Errorf("%d lines on a terminal of 7:\n%s", len(lines), first)
	}
	for _, l := range lines {
		if ansi.StringWidth(l) > 50 {
			t.Errorf("line is wider than the terminal: %q", l)
		}
	}
	press(m, tea.KeyPressMsg{Code: tea.KeyDown})
	if second := m.draw(); second == first || !strings.Contains(second, "QUEUE") {
		t.Errorf("down does not scroll the rows under their titles:\n%s", second)
	}
	press(m, tea.KeyPressMsg{Code: tea.KeyPgDown}, tea.KeyPressMsg{Code: tea.KeyPgDown})
	if last := m.draw(); !strings.Contains(last, "thumbs") {
		t.Errorf("the last row is out of reach:\n%s", last)
	}
}

func TestTopGoesOnWhenTheDatabaseIsAwayAndSaysSo(t *testing.T) {
	m := newTestTop(t, func(context.Context, *operator.Snapshot) (*operator.Snapshot, error) {
		return nil, errors.New("the database is away")
	})
	_, next := m.Update(m.next()())
	if picture := m.draw(); next == nil || !strings.Contains(picture, "the database is away") {
		t.Errorf("picture is\n%s", picture)
	}
	m.Update(arrived{snapshot: snapshotNow()})
	m.Update(arrived{err: errors.New("away again")})
	if picture := m.draw(); !strings.Contains(picture, "away again") || !strings.Contains(picture, "embed") {
		t.Errorf("the last picture is gone, or the error:\n%s", picture)
	}
}

func TestTopMeasuresRatesOverAFewSeconds(t *testing.T) {
	m := newTestTop(t, nil)
	for i := range 20 {
		m.Update(arrived{snapshot: &operator.Snapshot{At: noon.Add(time.Duration(i) * time.Second)}})
	}
	if span := m.past[len(m.past)-1].At.Sub(m.past[0].At); span != rateSpan {
		t.Errorf("rates are measured over %s, want %s", span, rateSpan)
	}
}

func TestTopFreezesPacesAndQuits(t *testing.T) {
	m := newTestTop(t, nil)
	m.Update(arrived{snapshot: snapshotNow()})
	press(m, tea.KeyPressMsg{Code: tea.KeySpace, Text: " "})
	m.Update(arrived{snapshot: &operator.Snapshot{}})
	if len(m.snapshot.Queues) == 0 {
		t.Error("a frozen picture changed")
	}
	for range 20 {
		press(m, key("+"))
	}
	if m.every != everyMin {
		t.Errorf("fastest pace is %s", m.every)
	}
	for range 20 {
		press(m, key("-"))
	}
	if m.every != everyMax {
		t.Errorf("slowest pace is %s", m.every)
	}
	if quit := press(m, key("q")); quit == nil {
		t.Error("q does not quit")
	} else if _, ok := quit().(tea.QuitMsg); !ok {
		t.Error("q does something else than quit")
	}
}

// Queues that the leader sampled have their rates at once; only where one was not sampled is a second snapshot worth a wait.
func TestTopOnceWaitsForQueuesWithoutASampleAlone(t *testing.T) {
	for sampled, want := range map[bool]int{true: 1, false: 2} {
		reads := 0
		read := func(context.Context, *operator.Snapshot) (*operator.Snapshot, error) {
			reads++
			s := snapshotNow()
			for i := range s.Queues {
				if sampled || i > 0 {
					s.Queues[i].SampledAt = &noon
				}
			}
			return s, nil
		}
		a := newApp(strings.NewReader(""), io.Discard, io.Discard, func(string) string { return "" })
		a.now = func() time.Time { return noon }
		if err := a.topOnce(t.Context(), read, time.Millisecond); err != nil || reads != want {
			t.Errorf("sampled %v: %d snapshots (%v), want %d", sampled, reads, err, want)
		}
	}
}
