// Package meter counts what work on a Postgres costs: CPU of all its processes, WAL, commits, buffers.
// It reads /proc, and so needs Linux and a server on the same machine.
package meter

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Meter reads what the server spent. Its connection is to another database than the one that is measured.
type Meter struct {
	conn       *pgx.Conn
	postmaster int // process id
}

// Reading is the server's counters at one moment. The measured database and the server are otherwise idle.
type Reading struct {
	walBytes, commits, buffers int64
	cpuSeconds                 float64
	machine                    machine
}

// machine is what all CPUs of the machine did since it started, in seconds.
type machine struct{ busy, total float64 }

// Spent is what the server spent between two readings.
type Spent struct {
	// of all its processes: backends, WAL writer, checkpointer, autovacuum
	CPUSeconds float64 `json:"server_cpu_seconds"`
	WALBytes   int64   `json:"wal_bytes"`
	Commits    int64   `json:"commits"`
	Buffers    int64   `json:"buffers"` // hit or read
}

// New returns a meter that reads through conn, which a superuser opened.
func New(ctx context.Context, conn *pgx.Conn) (*Meter, error) {
	var dir string
	if err := conn.QueryRow(ctx, `SHOW data_directory`).Scan(&dir); err != nil {
		return nil, fmt.Errorf("ask for the data directory: %w", err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "postmaster.pid"))
	if err != nil {
		return nil, fmt.Errorf("find the server's process: %w", err)
	}
	pid, err := strconv.Atoi(strings.SplitN(string(text), "\n", 2)[0])
	if err != nil {
		return nil, fmt.Errorf("find the server's process: %w", err)
	}
	return &Meter{conn: conn, postmaster: pid}, nil
}

const spentSQL = `
SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint, xact_commit, blks_hit + blks_read
FROM pg_stat_database WHERE datname = $1`

// Read takes the counters of database. A backend reports its statistics at most once a second and when it ends:
// call Settle or Flush before.
func (m *Meter) Read(ctx context.Context, database string) (Reading, error) {
	var r Reading
	err := m.conn.QueryRow(ctx, spentSQL, database).Scan(&r.walBytes, &r.commits, &r.buffers)
	if err != nil {
		return r, fmt.Errorf("read counters: %w", err)
	}
	if r.cpuSeconds, err = m.serverCPU(); err != nil {
		return r, err
	}
	r.machine, err = readMachine()
	return r, err
}

// Bystander is the application_name of connections that Settle does not wait for.
const Bystander = "bystander"

const strangersSQL = `
SELECT count(*) FROM pg_stat_activity
WHERE datname = $1 AND backend_type = 'client backend' AND application_name <> '` + Bystander + `'`

// Settle waits until the backends of database are gone, but for bystanders.
func (m *Meter) Settle(ctx context.Context, database string) error {
	for {
		var n int
		if err := m.conn.QueryRow(ctx, strangersSQL, database).Scan(&n); err != nil {
			return fmt.Errorf("count backends: %w", err)
		}
		if n == 0 {
			return nil
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// flushSQL scans a table, which is empty in databases without foreign tables and costs no buffer then: a backend that
// has used no table since it reported keeps its commits to itself, this one included. Both statements are one
// transaction.
const flushSQL = `
SET LOCAL enable_seqscan = on;
SELECT pg_stat_force_next_flush(), EXISTS (SELECT FROM pg_catalog.pg_foreign_table)`

// Flush lets the idle connections of pools report their statistics at once, as backends else do within a second. It
// returns how many there are: each counts a commit for it, which the next Read has.
func Flush(ctx context.Context, pools ...*pgxpool.Pool) (commits int64, err error) {
	for _, pool := range pools {
		for _, conn := range pool.AcquireAllIdle(ctx) {
			_, err := conn.Conn().PgConn().Exec(ctx, flushSQL).ReadAll()
			conn.Release()
			if err != nil {
				return commits, fmt.Errorf("flush statistics: %w", err)
			}
			commits++
		}
	}
	return commits, nil
}

// Since is what was spent from before to r.
func (r Reading) Since(before Reading) Spent {
	return Spent{
		CPUSeconds: r.cpuSeconds - before.cpuSeconds,
		WALBytes:   r.walBytes - before.walBytes,
		Commits:    r.commits - before.commits,
		Buffers:    r.buffers - before.buffers,
	}
}

// OthersShare is the share of the machine that neither client nor server had: 0 on a machine left alone.
// Rates of runs with a high share are not to be trusted; costs per entry bear it better.
func (r Reading) OthersShare(before Reading, clientCPUSeconds float64) float64 {
	busy := r.machine.busy - before.machine.busy - (r.cpuSeconds - before.cpuSeconds) - clientCPUSeconds
	return max(0, busy/(r.machine.total-before.machine.total))
}

// ticksPerSecond is USER_HZ, 100 on every Linux that Go runs on.
const ticksPerSecond = 100

// serverCPU adds up the postmaster, its living children, and (in the postmaster's own counters) its dead ones.
//
// A backend that ends while the processes are read one by one would be missed, or counted twice: so they are read
// again until two readings in a row found the same ones.
func (m *Meter) serverCPU() (float64, error) {
	for last := ""; ; {
		total, found := 0, ""
		err := m.processes(func(pid int, fields []string) {
			total += number(fields[11]) + number(fields[12])
			found += fmt.Sprint(pid, " ")
			if pid == m.postmaster {
				dead := number(fields[13]) + number(fields[14])
				total += dead
				found += fmt.Sprint(dead, " of the dead ")
			}
		})
		if err != nil || found == last {
			return float64(total) / ticksPerSecond, err
		}
		last = found
	}
}

// Pids are the processes of the server.
func (m *Meter) Pids() (pids []int, err error) {
	err = m.processes(func(pid int, _ []string) { pids = append(pids, pid) })
	return pids, err
}

// processes calls visit for the postmaster and its children, with the fields of their stat behind the name.
func (m *Meter) processes(visit func(pid int, fields []string)) error {
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return err
	}
	for _, path := range stats {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // the process ended meanwhile
		}
		// "pid (name) state ppid ...", and the name may contain anything: see proc(5).
		pid, rest, ok := strings.Cut(string(text), " (")
		fields := strings.Fields(rest[strings.LastIndex(rest, ")")+1:])
		if !ok || len(fields) < 15 {
			continue
		}
		if number(pid) == m.postmaster || number(fields[1]) == m.postmaster {
			visit(number(pid), fields)
		}
	}
	return nil
}

// readMachine reads the first line of /proc/stat: "cpu user nice system idle iowait irq softirq steal ...".
func readMachine() (machine, error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return machine{}, fmt.Errorf("read the machine's counters: %w", err)
	}
	fields := strings.Fields(strings.SplitN(string(text), "\n", 2)[0])
	var m machine
	for i, field := range fields[1:min(9, len(fields))] {
		seconds := float64(number(field)) / ticksPerSecond
		m.total += seconds
		if idle := i == 3 || i == 4; !idle {
			m.busy += seconds
		}
	}
	return m, nil
}

func number(field string) int {
	n, _ := strconv.Atoi(field) // the kernel writes numbers
	return n
}
