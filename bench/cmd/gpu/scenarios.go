package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"
)

// rate has all slots busy, called directly, through the queue and through the gateway, in turns.
func rate(p *testbed) error { return p.compare("rate", p.tokens) }

// few is rate with short answers: slots change hands often.
func few(p *testbed) error { return p.compare("few", p.few) }

// figures are those of one path in one round.
type figures struct {
	tokens, requests, busy float64 // a second; part of the slots that a step found with a request
	p50, p99               float64 // ms until the first token
	failed                 int
}

func (p *testbed) compare(name string, mean int) error {
	fmt.Printf("\n%s: answers of %d tokens in the mean, %d at once\n", name, mean, p.slots)
	fmt.Printf("%-8s %5s %10s %11s %7s %13s %8s %7s\n", "path", "round", "tokens/s", "requests/s", "busy",
		"first p50 ms", "p99", "failed")
	paths := []string{"direct", "queue", "gateway"}
	sums := map[string]*figures{"direct": {}, "queue": {}, "gateway": {}}
	for round := range p.rounds {
		for _, path := range paths {
			f, err := p.measure(path, mean)
			if err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
			fmt.Printf("%-8s %5d %10.0f %11.1f %6.1f%% %13.1f %8.1f %7d\n", path, round+1, f.tokens, f.requests,
				100*f.busy, f.p50, f.p99, f.failed)
			sum := sums[path]
			sum.tokens, sum.requests = sum.tokens+f.tokens, sum.requests+f.requests
		}
	}
	for _, path := range paths[1:] {
		fmt.Printf("%-8s / direct: tokens %.3f, requests %.3f\n", path, sums[path].tokens/sums["direct"].tokens,
			sums[path].requests/sums["direct"].requests)
	}
	return nil
}

// measure loads one path, and counts when all slots have been busy for a while.
func (p *testbed) measure(path string, mean int) (f figures, err error) {
	var c *callers
	end := func() error { c.end(); return nil }
	switch path {
	case "direct":
		c = p.clients(p.worker.url, p.slots, mean)
	case "gateway":
		c = p.clients(p.gateway.url, p.slots, mean)
	default:
		end = p.keep(4*p.slots, func() int { return around(mean) }, "load")
	}
	if err := p.until("the slots are busy", func() (bool, error) {
		h, err := p.health()
		return h.Active >= p.slots*3/4, err
	}); err != nil {
		_ = end()
		return f, err
	}
	time.Sleep(p.lasts / 3)
	if c != nil {
		c.reset()
	}
	before, err := p.health()
	began := time.Now()
	time.Sleep(p.lasts)
	after, err2 := p.health()
	took := time.Since(began).Seconds()
	if c != nil {
		firsts, failed, last := c.firsts()
		f.p50, f.p99, f.failed = quantile(firsts, 0.5), quantile(firsts, 0.99), failed
		if failed > 0 {
			fmt.Printf("%s: %v\n", path, last)
		}
	}
	if err := errors.Join(err, err2, end()); err != nil {
		return f, err
	}
	f.tokens = float64(after.Tokens-before.Tokens) / took
	f.requests = float64(after.Ended-before.Ended) / took
	// The first token of an answer comes from the pass over its prompt, not from a step.
	f.busy = (float64(after.Tokens-before.Tokens) - float64(after.Ended-before.Ended)) /
		float64(after.Steps-before.Steps) / float64(p.slots)
	return f, p.clear()
}

// cancels ends runs one by one, and takes the time until the worker computes no more for each: of entries, and of
// calls to the worker and to the gateway whose client leaves.
func cancels(p *testbed) error {
	n := min(20, p.slots/2)
	fmt.Printf("\ncancel: from the cancel until the worker has stopped, of %d runs each, ms\n", n)
	pushed, err := p.push(n, func() int { return p.longest }, "cancel")
	if err != nil {
		return err
	}
	if err := p.active(n); err != nil {
		return err
	}
	asked := map[string]time.Time{}
	for _, entry := range pushed {
		asked[entryID(entry)] = time.Now()
		if _, err := p.pool.Exec(p.ctx, `SELECT penstock.cancel_entry($1, 'bench')`, entry.ID); err != nil {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
	if err := p.active(0); err != nil {
		return err
	}
	if err := p.stops("entry", asked, func(e event) string { return e.Entry }); err != nil {
		return err
	}
	if err := p.leave("direct", p.worker.url, n); err != nil {
		return err
	}
	return p.leave("gateway", p.gateway.url, n)
}

// leave has clients leave in the middle of their answers.
func (p *testbed) leave(name, url string, n int) error {
	left := map[string]time.Time{}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for i := range n {
		user := fmt.Sprint(name, "-", i)
		pieces := 0
		ctx, cancel := context.WithCancel(p.ctx)
		_, _ = p.ask(ctx, client, url, body(p.longest, user), func() {
			if pieces++; pieces == 5 {
				left[user] = time.Now()
				cancel()
			}
		})
		cancel()
	}
	if err := p.active(0); err != nil {
		return err
	}
	return p.stops(name, left, func(e event) string { return e.User })
}

func (p *testbed) stops(name string, asked map[string]time.Time, keyOf func(event) string) error {
	time.Sleep(50 * time.Millisecond) // the log is written
	events, err := p.events()
	if err != nil {
		return err
	}
	var took []time.Duration
	for _, e := range events {
		if at, ok := asked[keyOf(e)]; ok && e.Event == "stop" {
			took = append(took, time.Duration((e.At-seconds(at))*float64(time.Second)))
		}
	}
	slices.Sort(took)
	fmt.Printf("%-8s %d of %d stopped: p50 %.1f, longest %.1f\n", name, len(took), len(asked), quantile(took, 0.5),
		quantile(took, 1))
	return nil
}

// fairness lets two flows with answers of very different lengths wait for all slots.
func fairness(p *testbed) error {
	const long, short = 256, 16
	fmt.Printf("\nfairness: two flows, answers of %d and %d tokens, both always with %d entries or more\n", long, short,
		2*p.slots)
	stopLong := p.keep(3*p.slots, func() int { return long }, "long")
	stopShort := p.keep(6*p.slots, func() int { return short }, "short")
	time.Sleep(p.lasts)
	from := time.Now()
	time.Sleep(3 * p.lasts)
	to := time.Now()
	if err := stopLong(); err != nil {
		return err
	}
	if err := stopShort(); err != nil {
		return err
	}
	if err := p.clear(); err != nil {
		return err
	}
	events, err := p.events()
	if err != nil {
		return err
	}
	spent, runs := shares(events, seconds(from), seconds(to))
	all := spent["long"] + spent["short"]
	fmt.Printf("slot time: long %.3f, short %.3f; runs that ended: %d and %d; %.1f %% of the slots in use\n",
		spent["long"]/all, spent["short"]/all, runs["long"], runs["short"],
		100*all/to.Sub(from).Seconds()/float64(p.slots))
	return nil
}

// shares adds the time that each user's requests had slots between two moments, and the runs that ended then.
func shares(events []event, from, to float64) (spent map[string]float64, runs map[string]int) {
	spent, runs = map[string]float64{}, map[string]int{}
	began := map[int]float64{}
	for _, e := range events {
		switch e.Event {
		case "begin":
			began[e.Key] = e.At
		case "end", "stop":
			if part := min(e.At, to) - max(began[e.Key], from); part > 0 {
				spent[e.User] += part
			}
			if e.Event == "end" && e.At > from && e.At < to {
				runs[e.User]++
			}
		}
	}
	return spent, runs
}
