package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/penstock/penstock/chaos/judge"
	"github.com/penstock/penstock/chaos/pgproxy"
)

// config is what the flags say.
type config struct {
	run, drainMax  time.Duration
	ops            int64 // the load ends after so many operations, and the faults with it; 0: after run
	seed           uint64
	rate           float64
	nodes, leaders int
	gateways       int
	lease, term    time.Duration // of task nodes, of leaders
	rare           bool          // as many answers of each kind are lost, also of those that are rare
	release        bool          // the run ends when enough was killed and lost
	kills          bool          // task nodes are killed, and nothing else happens
	holds          bool          // most faults are rows that are locked
	stops          bool          // most faults are task nodes that are stopped, and most runs end in an error at first
	refuses        bool          // most faults are workers that refuse calls
	binaries, logs string
	before         string // directory with the programs of another build; empty: none
	clock, faults  bool
	failpoints     bool // the programs end themselves around commits
	disk, snapshot bool
	partitions     bool   // partitions are dropped and made all the while
	standby        string // sync, async or empty: none
}

// site is everything that runs.
type site struct {
	cfg      config
	db       *database
	proxy    *pgproxy.Proxy
	policy   *policy
	recorder *recorder
	leaders  []*process
	nodes    []*process
	gateways []*process
	fronts   []string // addresses of the gateways
	load     *load
	furthest time.Duration // that the server's clock was ahead
	disk     *smallDisk    // nil: Postgres has the disk of the machine
	standby  *standby      // nil: there is none

	mu       sync.Mutex
	closing  bool
	pending  sync.WaitGroup // starts that are to come
	problems []error        // of the harness itself, or exits that nobody asked for
	samples  []judge.Sample
	tables   map[string]*judge.Table
	restarts []time.Time
	disturbs []judge.Disturbance
	slow     []judge.Disturbance // times in which Postgres was slow to the harness
	points   map[string]int      // failpoints that were met
	plan     string              // of failpoints; empty while there are no faults
	paused   time.Time           // when the schedules were paused, after the faults
	sizes    []footprint         // of the programs and the tables, once a minute
	lateness time.Duration       // the longest time for which the harness itself was not run when it should have been
}

func openSite(ctx context.Context, cfg config) (s *site, err error) {
	s = &site{
		cfg: cfg, policy: newPolicy(cfg.seed, cfg.rare), tables: map[string]*judge.Table{}, points: map[string]int{},
	}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	var fake *clock
	if cfg.clock {
		if fake = findClock(cfg.logs); fake == nil {
			return s, errors.New("libfaketime is not installed (Debian: apt-get install libfaketime)")
		}
	}
	leave := func() {}
	if cfg.disk {
		if s.disk, err = mountSmallDisk(ctx); err != nil {
			fmt.Printf("chaos: no disk is filled: %v\n", err)
		} else {
			leave = s.disk.inEnvironment()
		}
	}
	s.db, err = startDatabase(ctx, fake)
	leave() // a standby has the disk of the machine
	if err != nil {
		return s, err
	}
	if s.recorder, err = newRecorder(); err != nil {
		return s, err
	}
	s.proxy = pgproxy.New("unix", s.db.socket, s.policy)
	key := filepath.Join(cfg.logs, "key")
	if err := os.WriteFile(key, []byte("key of the installation"), 0o600); err != nil {
		return s, err
	}
	if err := s.startPrograms(ctx, key); err != nil {
		return s, err
	}
	s.db.keep = cfg.logs
	if err := setUp(ctx, s.db, s.recorder, cfg.timetable()); err != nil {
		return s, errors.Join(append([]error{err}, asErrors(s.db.deadlocks())...)...)
	}
	if cfg.gateways > 0 {
		if err := setUpOnline(ctx, s.db, s.recorder); err != nil {
			return s, err
		}
	}
	s.policy.killer = s.killLink
	s.policy.named = s.incarnationOf
	if cfg.standby != "" {
		if s.standby, err = startStandby(ctx, s.db, cfg.standby == "sync"); err != nil {
			return s, err
		}
	}
	return s, nil
}

func asErrors(lines []string) (list []error) {
	for _, line := range lines {
		list = append(list, errors.New(line))
	}
	return list
}

func (s *site) startPrograms(ctx context.Context, key string) error {
	var addresses []string
	for i := range s.cfg.leaders {
		listen, err := freeAddress(ctx)
		if err != nil {
			return err
		}
		addresses = append(addresses, "http://"+listen)
		l, err := s.add(ctx, "leader", fmt.Sprintf("l%d", i+1), func(_, database string) []string {
			args := []string{
				"--listen", listen, "--debug-listen", "127.0.0.1:0", "--open", "--database-url", database,
				"--election-lease", s.cfg.term.String(), "--callback-allow-networks", "127.0.0.0/8",
				"--http-timeout", "8s",
			}
			if s.cfg.rare { // a transaction for each lock, also while many nodes die together
				args = append(args, "--recovery-pass-locks-max", "1", "--recovery-suspend-share", "1")
			}
			return args
		})
		if err != nil {
			return err
		}
		s.leaders = append(s.leaders, l)
		if i == 0 && s.cfg.before != "" {
			if err := s.upgrade(ctx, l, addresses); err != nil {
				return err
			}
		}
	}
	if err := s.ready(ctx, addresses); err != nil {
		return err
	}
	for i := range s.cfg.nodes {
		n, err := s.add(
			ctx,
			"tasknode",
			fmt.Sprintf("n%d", i+1),
			func(incarnation, database string) []string {
				return []string{
					"--name", incarnation, "--listen", "127.0.0.1:0", "--database-url", database,
					"--threads", "16", "--governor=false",
					"--lease", s.cfg.lease.String(), "--beat", (s.cfg.lease / 6).String(), "--grace", "5s",
					"--webhook-key", "file:" + key, "--webhook-allow-networks", "127.0.0.0/8",
					"--database-max-conns", "6",
				}
			},
		)
		if err != nil {
			return err
		}
		s.nodes = append(s.nodes, n)
	}
	if err := s.startGateways(ctx); err != nil {
		return err
	}
	clients, err := s.proxy.Open(ctx, "client")
	if err != nil {
		return err
	}
	s.load = newLoad(ctx, s.cfg, addresses, clients, s.recorder, s.db)
	return nil
}

// upgrade lets the other build make the schema, and starts the leader again with the newer one: programs whose
// functions were never applied to a database do not start on it.
func (s *site) upgrade(ctx context.Context, l *process, addresses []string) error {
	if err := s.ready(ctx, addresses); err != nil {
		return fmt.Errorf("other build: %w", err)
	}
	l.drain()
	l.change()
	return l.start()
}

func (s *site) add(
	ctx context.Context,
	kind, name string,
	args func(incarnation, database string) []string,
) (*process, error) {
	link, err := s.proxy.Open(ctx, name)
	if err != nil {
		return nil, err
	}
	p := &process{
		kind: kind,
		name: name,
		path: filepath.Join(s.cfg.binaries, kind),
		args: args,
		link: link,
		logs: s.cfg.logs,
	}
	if s.cfg.failpoints {
		p.failpoints = s.failpoints
		p.atFailpoint = func(at string) {
			if p.kind == "leader" {
				s.disturbed("failpoint of a leader", time.Now(), 300*time.Millisecond)
			}
			s.mu.Lock()
			s.points[at]++
			s.mu.Unlock()
			s.startLater(p, 300*time.Millisecond)
		}
	}
	if s.cfg.before != "" && kind != "gateway" {
		p.otherPath, p.other = filepath.Join(s.cfg.before, kind), kind == "leader" && len(s.leaders) == 0
	}
	return p, p.start()
}

// ready waits until every leader serves: the first one has migrated the database.
func (s *site) ready(ctx context.Context, addresses []string) error {
	deadline := time.Now().Add(90 * time.Second)
	for _, a := range addresses {
		for {
			r, err := http.NewRequestWithContext(ctx, http.MethodGet, a+"/readyz", nil)
			if err != nil {
				return err
			}
			answer, err := http.DefaultClient.Do(r)
			if err == nil {
				answer.Body.Close()
				if answer.StatusCode == http.StatusOK {
					break
				}
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("leader at %s is not ready: see %s", a, s.cfg.logs)
			}
			time.Sleep(50 * time.Millisecond)
		}
	}
	return nil
}

// freeAddress returns an address that stays free until a program listens there, again after each of its deaths: its
// port is below those that the system gives to connections and to listeners that ask for any.
func freeAddress(ctx context.Context) (string, error) {
	var err error
	for range 100 {
		address := fmt.Sprintf("127.0.0.1:%d", 20000+rand.IntN(12000))
		var l net.Listener
		if l, err = (&net.ListenConfig{}).Listen(ctx, "tcp", address); err == nil {
			return address, l.Close()
		}
	}
	return "", err
}

func (s *site) all() []*process { return slices.Concat(s.leaders, s.nodes, s.gateways) }

func (s *site) find(link string) *process {
	for _, p := range s.all() {
		if p.name == link {
			return p
		}
	}
	return nil
}

// killLink kills the process of a link, for a fault at a commit.
func (s *site) killLink(link string) {
	if p := s.find(link); p != nil && p.kill() {
		s.startLater(p, 500*time.Millisecond)
	}
}

func (s *site) incarnationOf(link string) string {
	p := s.find(link)
	if p == nil {
		return link
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.current()
}

// startLater starts a process again, unless the run is over by then.
func (s *site) startLater(p *process, after time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		return
	}
	s.pending.Add(1)
	time.AfterFunc(after, func() {
		defer s.pending.Done()
		// A killed process may take a moment to be gone.
		for range 100 {
			if up, _ := p.up(); !up {
				break
			}
			time.Sleep(20 * time.Millisecond)
		}
		if err := p.start(); err != nil {
			s.fail(err)
		}
	})
}

func (s *site) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.problems = append(s.problems, err)
}

// disturbed notes that recovery was kept from its work, or its evidence was spoilt, from a time on.
func (s *site) disturbed(what string, from time.Time, lasts time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.disturbs = append(s.disturbs, judge.Disturbance{What: what, From: from, To: from.Add(lasts)})
}

func (s *site) restarted() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.restarts = append(s.restarts, time.Now())
}

// watch starts programs again that ended by themselves, which is a finding unless the database was
// away at their start.
func (s *site) watch(ctx context.Context) {
	gone := map[*process]int{}
	for ctx.Err() == nil {
		for _, p := range s.all() {
			up, how := p.up()
			if up {
				gone[p] = 0
				continue
			}
			// Whoever ended it starts it again within 5 s.
			if gone[p]++; gone[p] > 80 {
				gone[p] = 0
				s.fail(fmt.Errorf("%s ended by itself (%s): see its log in %s", p.current(), how, s.cfg.logs))
				s.startLater(p, 0)
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// heal ends every fault and brings all programs up.
func (s *site) heal(ctx context.Context) error {
	s.policy.disarm()
	s.endFailpoints()
	if s.db.clock != nil {
		// Due times were set by the clock as it was: it stays at the furthest, where all of them have come.
		if err := s.db.clock.jump(s.furthest); err != nil {
			return err
		}
	}
	s.recorder.behave(honest, 0)
	s.pending.Wait()
	for _, p := range s.all() {
		p.link.Refuse(false)
		p.link.Delay(0)
		p.link.Blackhole(false, false)
		p.link.Deaf(false)
		p.thaw()
		if err := p.start(); err != nil {
			return err
		}
	}
	deadline := time.Now().Add(2 * time.Minute)
	for {
		err := s.db.pool.Ping(ctx)
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func (s *site) isClosing() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closing
}

func (s *site) close() {
	s.mu.Lock()
	s.closing = true
	s.mu.Unlock()
	s.pending.Wait()
	for _, p := range s.all() {
		p.kill()
		p.link.Close()
	}
	if s.recorder != nil {
		s.recorder.server.Close()
	}
	if s.db != nil {
		s.db.close()
	}
	if s.standby != nil {
		s.standby.close()
	}
	if s.disk != nil {
		s.disk.unmount()
	}
}
