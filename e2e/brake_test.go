package e2e_test

import (
	"testing"
	"time"
)

// An elected leader, with the rights of its role and no more, refuses pushes to a database that is larger than it may
// be, and to a queue that is as deep as the default capacity.
func TestALeaderRefusesPushesWhereThereIsNoRoom(t *testing.T) {
	for reason, option := range map[string]string{
		"storage": "--brake-database-bytes-max=1", "depth": "--brake-queue-entries-max=1",
	} {
		t.Run(reason, func(t *testing.T) {
			t.Parallel()
			s := newSite(t, 0)
			s.exec(`SELECT penstock.push('work', '{}')`)
			s.startLeader("leader_a", option)
			eventually(t, time.Minute, "pushes are refused", func() bool {
				return s.query(`SELECT count(*) FROM penstock.queue WHERE name = 'work' AND refusal->>'reason' = $1`, reason) == 1
			})
		})
	}
}
