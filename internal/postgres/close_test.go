package postgres

import (
	"testing"
	"testing/synctest"
	"time"
)

// Connections that a database does not let go of do not hold up the end of the program.
func TestCloseDoesNotWaitForTheDatabase(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		began, answers := time.Now(), make(chan struct{})
		wait := func() { <-answers }
		Close(wait, wait)
		if took := time.Since(began); took != closeMax {
			t.Errorf("the end took %s", took)
		}
		close(answers)
		Close(wait)
		if took := time.Since(began); took != closeMax {
			t.Errorf("the end of closed pools took %s", took-closeMax)
		}
	})
}
