package postgres

import (
	"context"
	"errors"
	"net"
	"os"
	"testing"
	"testing/synctest"
	"time"
)

// A read ends without an answer, unless pgconn has set a deadline, which is that of a context that has ended.
func TestReadsEndWithoutAnAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const answer = 50 * time.Millisecond
		near, far := net.Pipe()
		defer far.Close()
		dial := closingSoon(func(context.Context, string, string) (net.Conn, error) { return near, nil }, answer)
		conn, err := dial(t.Context(), "tcp", "")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		timesOut := func(contract string) {
			t.Helper()
			if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("%s: %v", contract, err)
			}
		}
		timesOut("a read without an answer")
		if err := conn.SetDeadline(time.Unix(1, 0)); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		timesOut("a read after its context has ended")
		if took := time.Since(start); took != 0 {
			t.Errorf("the end of a context was forgotten: the read took %v", took)
		}
		if err := conn.SetDeadline(time.Time{}); err != nil {
			t.Fatal(err)
		}
		timesOut("a read of the next statement")
	})
}
