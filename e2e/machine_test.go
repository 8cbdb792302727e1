package e2e_test

import (
	"fmt"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/devpostgres"
	"github.com/penstock/penstock/internal/machine"
)

// watchMachine probes until the test ends.
func (s *site) watchMachine() *machine.Machine {
	s.t.Helper()
	return machine.Watch(s.t, s.dsn, s.consumers())
}

// consumers are the processes of the site of a test: the programs that it started, and its Postgres.
func (s *site) consumers() *machine.Consumers {
	s.t.Helper()
	test, directory := testOf(s.t), ""
	if err := s.pool.QueryRow(s.t.Context(), `SHOW data_directory`).Scan(&directory); err != nil {
		s.t.Fatal(err)
	}
	return machine.Of(directory, func() (running []int, ended time.Duration) {
		for _, p := range programsOf(test) {
			select {
			case <-p.ended:
				ended += p.cmd.ProcessState.UserTime() + p.cmd.ProcessState.SystemTime()
			default:
				running = append(running, p.cmd.Process.Pid)
			}
		}
		return running, ended
	})
}

// within judges the time between the two moments, on the clock of the database, that a query returns.
func (s *site) within(m *machine.Machine, what string, bound time.Duration, sql string, args ...any) {
	s.t.Helper()
	if from, to, happened := s.moments(what, sql, args...); happened {
		m.Judge(s.t, what, from, to, bound)
	}
}

// worked is within for work that keeps processors busy all that time, such as many claims.
func (s *site) worked(m *machine.Machine, what string, bound time.Duration, sql string, args ...any) {
	s.t.Helper()
	if from, to, happened := s.moments(what, sql, args...); happened {
		m.JudgeWork(s.t, what, from, to, bound)
	}
}

// moments returns the two moments of a query, and whether there are both.
func (s *site) moments(what, sql string, args ...any) (began, ended time.Time, happened bool) {
	s.t.Helper()
	var from, to *time.Time
	if err := s.pool.QueryRow(s.t.Context(), sql, args...).Scan(&from, &to); err != nil {
		s.t.Fatalf("%s: %v", what, err)
	}
	if from == nil || to == nil {
		s.t.Errorf("%s did not happen", what)
		return began, ended, false
	}
	return *from, *to, true
}

// What the programs and the database of a site take is not taken by others, and what other tests take is.
func TestTimeOfASiteIsThatOfItsProgramsAndItsPostgres(t *testing.T) {
	t.Parallel()
	if _, err := machine.BusyTime(); err != nil {
		t.Logf("this machine does not tell: %v; nothing is withheld then", err)
		return
	}
	const tick = 10 * time.Millisecond // the unit of times in /proc
	s := newSite(t, 0)                 // no leader takes time meanwhile
	own := s.consumers()
	burn := exec.CommandContext(t.Context(), "sh", "-c", `i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done`)
	before := own.Time()
	s.query(`SELECT count(*) FROM generate_series(1, 3000000)`)
	byServer := own.Time()
	if byServer-before < 5*tick {
		t.Errorf("three million rows of the site's Postgres took %v of the site's time", byServer-before)
	}
	if out, err := burn.CombinedOutput(); err != nil {
		t.Fatal(fmt.Errorf("%w: %s", err, out))
	}
	had := burn.ProcessState.UserTime() + burn.ProcessState.SystemTime()
	if grown := own.Time() - byServer; grown >= had {
		t.Errorf("a process of the test had %v, and the time of the site grew by %v", had, grown)
	}
	leader := s.startLeader("leader_a")
	leader.signal(syscall.SIGKILL)
	<-leader.ended
	left := own.Time()
	if had := leader.cmd.ProcessState.UserTime() + leader.cmd.ProcessState.SystemTime(); had < tick || left < had {
		t.Errorf("the killed leader had %v, the site %v", had, left)
	}
	s.server.Restart(devpostgres.Immediate)
	if after := own.Time(); after < left {
		t.Errorf("the site had %v, and %v after a restart of its Postgres", left, after)
	}
}
