package tasknode

import (
	"testing"
	"time"
)

// A poll that takes long, because the database is slow or away, is waited for by the other scheduling threads: they
// do not wake each millisecond to see whether it has ended.
func TestThreadsRestWhileAnotherOnePolls(t *testing.T) {
	var p lanePoll
	now := time.Now()
	p.want()
	if !p.start(now) {
		t.Fatal("the first poll did not begin")
	}
	p.want()
	if wait := p.wait(now); wait < time.Minute {
		t.Errorf("during a poll the next try comes after %v", wait)
	}
	p.end(now, 10*time.Millisecond, false)
	if wait := p.wait(now); wait != 100*time.Millisecond {
		t.Errorf("after a poll of 10ms the poll that was wanted meanwhile may begin after %v, want 100ms", wait)
	}
}
