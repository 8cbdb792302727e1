package duty

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// withoutTime is a log whose lines have no times.
func withoutTime(text *bytes.Buffer) *slog.Logger {
	return slog.New(slog.NewTextHandler(text, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))
}

// A database that takes no writes for a while gave a line each second of each duty.
func TestAStepThatGoesOnFailingHasALineAtBothEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var errs Errors
		var text bytes.Buffer
		var f Failing
		log := errs.Log("probes", withoutTime(&text))
		try := func(n int, err error) {
			for range n {
				f.Note(t.Context(), log, slog.LevelError, "claim", err, "queue", "mails")
				time.Sleep(time.Second)
			}
		}
		try(3, nil)
		try(650, errors.New("read-only"))
		try(3, nil)
		try(1, errors.New("away"))
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		f.Note(ended, log, slog.LevelError, "claim", nil)
		const want = `
level=ERROR msg="a step failed; trying again" duty=probes step=claim error=read-only queue=mails
level=ERROR msg="a step failed; trying again" duty=probes step=claim error=read-only queue=mails
level=INFO msg="a step works again" duty=probes step=claim after=10m50s failures=650
level=ERROR msg="a step failed; trying again" duty=probes step=claim error=away queue=mails
`
		if got := "\n" + text.String(); got != want {
			t.Errorf("the log is %s, want %s", got, want)
		}
		if n := errs.Counts()["probes"]; n != 651 {
			t.Errorf("%d errors were counted, want each of 651 tries", n)
		}
	})
}

// Claims of two lanes of a queue, of which one fails, gave a line each.
func TestAStepThatFailsAtEverySecondTryHasFewLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var errs Errors
		var text bytes.Buffer
		var f FailingEach
		log := errs.Log("node", withoutTime(&text))
		try := func(err error) {
			f.Note(t.Context(), log, slog.LevelError, "claim", "mails", err, "queue", "mails")
			time.Sleep(100 * time.Millisecond)
		}
		for range 100 { // 20 s
			try(errors.New("away"))
			try(nil)
		}
		if n := strings.Count(text.String(), "\n"); n != 4 {
			t.Errorf("%d lines, want one at each end, twice:\n%s", n, text.String())
		}
		text.Reset()
		for range 200 { // it goes on failing
			try(errors.New("away"))
		}
		try(nil)
		if lines := text.String(); strings.Count(lines, "\n") != 2 || !strings.Contains(lines, "failures=200") {
			t.Errorf("the lines are\n%s, want one at each end", lines)
		}
		if n := errs.Counts()["node"]; n != 300 {
			t.Errorf("%d errors were counted, want each of 300", n)
		}
	})
}

// Each object that began to fail had all others looked through.
func TestTimedObjectsThatFailAreNotComparedWithEachOther(t *testing.T) {
	note := func(n int) time.Duration {
		log, err, least := slog.New(slog.DiscardHandler), errors.New("away"), time.Hour
		for range 3 {
			var f FailingEach
			start := time.Now()
			for i := range n {
				f.Note(t.Context(), log, slog.LevelInfo, "probe", strconv.Itoa(i), err)
			}
			least = min(least, time.Since(start))
		}
		return least
	}
	if few, many := note(2000), note(20_000); many > 100*few {
		t.Errorf("2,000 objects take %v, 20,000 %v", few, many)
	}
}

// A step whose try has a context of its own has failed where that context's time is over. It had no line.
func TestAStepThatTakesTooLongHasALine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var text bytes.Buffer
		log := withoutTime(&text)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		<-ctx.Done()
		var one Failing
		one.Note(ctx, log, slog.LevelWarn, "read queues", ctx.Err())
		var each FailingEach
		each.Note(ctx, log, slog.LevelWarn, "lease slots", "m", ctx.Err(), "model", "m")
		const want = `
level=WARN msg="a step failed; trying again" step="read queues" error="context deadline exceeded"
level=WARN msg="a step failed; trying again" model=m step="lease slots" error="context deadline exceeded"
`
		if got := "\n" + text.String(); got != want {
			t.Errorf("the log is %s, want %s", got, want)
		}
	})
}

func TestALoopSaysWhenItsPassesWorkAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var text bytes.Buffer
		n := 0
		l := Loop{Name: "test", Pause: time.Second, Log: withoutTime(&text)}
		err := l.Run(ctx, func(context.Context) (time.Duration, error) {
			switch n++; {
			case n <= 5:
				return 0, errors.New("away")
			case n > 7:
				cancel()
			}
			return time.Second, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		const want = `level=INFO msg="a step works again" step=pass after=5s failures=5`
		if lines := strings.Count(text.String(), "\n"); lines != 2 || !strings.Contains(text.String(), want) {
			t.Errorf("the log is %s, want two lines, the second of them %s", text.String(), want)
		}
	})
}

func TestEachObjectOfAStepHasItsLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var errs Errors
		var text bytes.Buffer
		var f FailingEach
		log := errs.Log("depths", withoutTime(&text))
		try := func(queue string, err error) {
			f.Note(t.Context(), log, slog.LevelError, "count a queue", queue, err, "queue", queue)
		}
		for range 100 {
			try("mails", errors.New("denied"))
			try("bills", errors.New("away"))
			try("chats", nil)
			time.Sleep(time.Second)
		}
		try("mails", nil)
		const want = `
level=ERROR msg="a step failed; trying again" duty=depths queue=mails step="count a queue" error=denied
level=ERROR msg="a step failed; trying again" duty=depths queue=bills step="count a queue" error=away
level=INFO msg="a step works again" duty=depths queue=mails step="count a queue" after=1m40s failures=100
`
		if got := "\n" + text.String(); got != want {
			t.Errorf("the log is %s, want %s", got, want)
		}
		if n := errs.Counts()["depths"]; n != 200 {
			t.Errorf("%d errors were counted, want each of 200", n)
		}
		time.Sleep(2*remindAfter + time.Second)
		if try("new", errors.New("away")); len(f.steps) != 1 {
			t.Errorf("%d objects are kept, want the one that is tried still", len(f.steps))
		}
	})
}
