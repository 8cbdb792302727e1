// Command chaos tries to make the queue break its promises: it starts the real programs on a
// private Postgres, behind a proxy that understands the Postgres protocol, under a mixed load, and
// kills, stops, cuts and misleads them as a seed says. Judges that know nothing of the product
// decide from three independent records whether each promise held.
//
// docs/reliability.md explains what is done and what was found. The exit status is 1 if a promise
// was broken, or if the run does not show that they all held.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/penstock/penstock/chaos/judge"
)

func main() {
	var cfg config
	var keep bool
	cfg.flags(&keep)
	hunting := flag.Bool(
		"mutants",
		false,
		"build the programs with one known bug after another and see whether it is found",
	)
	only := flag.String("only", "",
		"with -mutants: those whose name contains one of these words, which commas separate")
	results := flag.String("results", "",
		"with -mutants: a file for results; what was found at this commit is not done again")
	flag.Parse()
	cfg.rare = cfg.rare || cfg.release
	if cfg.seed == 0 {
		cfg.seed = uint64(rand.Uint32())
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	if *hunting {
		missed, err := hunt(ctx, cfg.seed, *only, *results)
		stop()
		end(err, missed > 0)
	}
	v, err := run(ctx, cfg, keep)
	stop()
	if v != (verdict{}) {
		fmt.Printf("chaos: %d promises were broken, %d things are missing to say that the others held; again with: "+
			"make chaos CHAOS=%v ARGS='-seed %d'\n", v.broken, v.missing, cfg.run, cfg.seed)
	} else if err == nil {
		fmt.Println("chaos: every promise held")
	}
	end(err, v != verdict{})
}

// flags defines the flags of a run.
func (c *config) flags(keep *bool) {
	flag.DurationVar(&c.run, "for", 10*time.Minute, "how long load and faults last")
	flag.Int64Var(
		&c.ops,
		"ops",
		0,
		"end load and faults after so many operations of clients, at the latest after -for",
	)
	flag.StringVar(
		&c.before,
		"before",
		"",
		"directory with the programs of another build: rolling restarts change builds",
	)
	flag.BoolVar(
		&c.disk,
		"disk",
		false,
		"keep the database on a small disk and fill it up now and then; needs root",
	)
	flag.BoolVar(&c.snapshot, "snapshot", false, "hold a snapshot all the while, so that no dead row is removed")
	flag.BoolVar(&c.partitions, "partitions", false, "drop and make partitions of results and failures now and then")
	flag.StringVar(&c.standby, "standby", "", "sync or async: promote a standby, with the old primary still up")
	flag.Uint64Var(&c.seed, "seed", 0, "of load and faults; 0: a random one, which is printed")
	flag.Float64Var(&c.rate, "rate", 25, "operations of clients a second")
	flag.IntVar(&c.nodes, "nodes", 3, "task nodes")
	flag.IntVar(&c.leaders, "leaders", 2, "leaders")
	flag.IntVar(&c.gateways, "gateways", 0, "gateways, with clients that wait, and faults that aim at them")
	flag.DurationVar(&c.lease, "lease", 3*time.Second, "of task nodes")
	flag.DurationVar(&c.term, "election-lease", 4*time.Second, "of leaders")
	flag.BoolVar(&c.rare, "rare", false,
		"lose as many answers to recoveries, schedules, elections and heartbeats as to pushes, claims and finishes")
	flag.BoolVar(&c.release, "release", false, fmt.Sprintf(
		"as -rare, until %d programs were killed and %d answers to each kind of commit were swallowed, "+
			"at most for -for",
		releaseKills, releaseAnswers))
	flag.BoolVar(&c.holds, "holds", false,
		"nearly all faults are rows of running entries that another transaction keeps locked, and few processes die")
	flag.BoolVar(&c.stops, "stops", false,
		"nearly all faults are SIGSTOPs of task nodes for longer than a lease, and most runs take seconds and end "+
			"in an error at first: nodes record errors of runs that others have by then")
	flag.BoolVar(&c.refuses, "refusals", false,
		"nearly all faults are workers that refuse calls, so that entries are handed back before others of their key")
	flag.BoolVar(&c.kills, "kills", false,
		"the only faults are SIGKILLs of task nodes, one every few seconds: how long their locks wait for recovery")
	flag.DurationVar(
		&c.drainMax,
		"drain",
		time.Minute,
		"how long after the faults everything may take to end",
	)
	flag.BoolVar(
		&c.failpoints,
		"failpoints",
		false,
		"let the programs end themselves before and after commits; needs programs built with the tag failpoints",
	)
	flag.StringVar(&c.binaries, "bin", "../bin", "directory with the programs leader and tasknode")
	flag.BoolVar(
		&c.clock,
		"clock",
		false,
		"let the server's clock jump by up to an hour; needs libfaketime",
	)
	flag.BoolVar(&c.faults, "faults", true, "false: the load alone, which must break nothing either")
	flag.BoolVar(keep, "keep", false, "keep the logs of the programs")
}

// end ends the program with its status: 1 if something was found (or, of mutants, not found), 2 if
// the harness itself failed.
func end(err error, bad bool) {
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, "chaos:", err)
		os.Exit(2)
	case bad:
		os.Exit(1)
	}
	os.Exit(0)
}

// makeLogs makes the directory of the logs.
func (c *config) makeLogs() (err error) {
	if c.logs, err = os.MkdirTemp("", "penstock-chaos-"); err != nil {
		return err
	}
	return os.Chmod(c.logs, 0o755) //nolint:gosec // the server's user reads the moved clock there
}

func run(ctx context.Context, cfg config, keep bool) (v verdict, err error) {
	if cfg.binaries, err = filepath.Abs(cfg.binaries); err != nil {
		return v, err
	}
	if err := cfg.makeLogs(); err != nil {
		return v, err
	}
	fmt.Printf("chaos: seed %d, %v, logs in %s\n", cfg.seed, cfg.run, cfg.logs)
	defer func() {
		if !keep && v == (verdict{}) && err == nil {
			os.RemoveAll(cfg.logs)
		}
	}()
	s, err := openSite(ctx, cfg)
	if err != nil {
		return v, err
	}
	defer s.close()
	patient, giveUp := context.WithCancel(context.WithoutCancel(ctx))
	defer giveUp()
	s.load.patient = patient
	p := newPlan(s, cfg.seed)
	took := s.storm(ctx, p)
	if ctx.Err() != nil {
		return v, errors.New("interrupted: nothing was judged")
	}
	if err := s.heal(ctx); err != nil {
		return v, fmt.Errorf("heal: %w", err)
	}
	time.AfterFunc(30*time.Second, giveUp)
	s.load.wait()
	backlog, err := s.backlog(ctx)
	if err != nil {
		return v, err
	}
	drained := s.drain(ctx, "drain.txt")
	left, faultFree := drained.left, time.Duration(0)
	if len(left) == 0 {
		if left, faultFree, err = s.runWithoutFaults(ctx, backlog); err != nil {
			return v, err
		}
		fmt.Printf("chaos: %d entries were left by the faults and ended within %v, without faults %s; last: %s\n",
			len(backlog), round(drained.took), endedWithin(left, faultFree), drained.last)
	}
	if left, err = s.bringCases(ctx, &drained, left); err != nil {
		return v, err
	}
	unhinted, err := s.probe(ctx)
	if err != nil {
		return v, fmt.Errorf("probe: %w", err)
	}
	unserved := s.serves(ctx)
	quiet := s.awaitCallbacks()
	h, err := s.history(ctx)
	if err != nil {
		return v, err
	}
	h.Quiet = quiet
	drained.tell(h, cfg.rare)
	h.Unfinished, h.FaultFree, h.Unhinted, h.Unserved = left, faultFree, unhinted, unserved
	if h.Deadlocks, err = s.deadlocks(); err != nil {
		return v, err
	}
	if h.Told, err = s.load.tell(ctx, someEntries(h, 200)); err != nil {
		return v, fmt.Errorf("ask for outcomes: %w", err)
	}
	findings := judge.Judge(h)
	if err := s.keepEvidence(ctx, h, findings); err != nil {
		return v, err
	}
	return s.report(os.Stdout, p, h, findings, took), nil
}

// bringCases brings about what promises need as a case and a run may not have: a slot in doubt and, in a release run,
// entries that are long in line. It adds slots that stay in doubt to d, and returns left with what has not ended.
func (s *site) bringCases(ctx context.Context, d *drained, left []string) ([]string, error) {
	unusable, err := s.breakOff(ctx, len(left) == 0)
	if err != nil {
		return nil, err
	}
	d.doubtful = append(d.doubtful, unusable...)
	if !s.cfg.release {
		return left, nil
	}
	inLine, err := s.lineUp(ctx)
	return append(left, inLine...), err
}

// storm is the load and the faults, and what is recorded meanwhile.
func (s *site) storm(ctx context.Context, p *plan) time.Duration {
	began := time.Now()
	go s.watchServer(context.WithoutCancel(ctx))
	ctx, end := context.WithTimeout(ctx, s.cfg.run)
	defer end()
	ended := make(chan struct{}, 8)
	duties := []func(context.Context){
		func(ctx context.Context) {
			s.load.run(ctx, s.cfg.rate, s.cfg.ops)
			if s.cfg.ops > 0 {
				end()
			}
		},
		s.sample, s.watch, s.watchItself, s.watchFootprint,
	}
	if s.cfg.release {
		duties = append(duties, func(ctx context.Context) {
			s.untilReleased(ctx)
			end()
		})
	}
	if s.cfg.gateways > 0 {
		duties = append(duties, s.askOnline)
	}
	if s.cfg.snapshot {
		duties = append(duties, s.holdSnapshots)
	}
	if s.cfg.faults {
		if !s.cfg.kills {
			s.policy.begin()
		}
		s.beginFailpoints()
		duties = append(duties, p.run)
	}
	for _, duty := range duties {
		go func() {
			duty(ctx)
			ended <- struct{}{}
		}()
	}
	for range duties {
		<-ended
	}
	return time.Since(began)
}

// someEntries returns n entries that have ended, spread over the run.
func someEntries(h *judge.History, n int) []int64 {
	var ids []int64
	for i := 0; i < len(h.Endings); i += max(1, len(h.Endings)/n) {
		ids = append(ids, h.Endings[i].Entry)
	}
	return ids
}
