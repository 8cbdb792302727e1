package main

import (
	"fmt"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// kill ends the task node at once while it runs as many entries as there are slots, beside a second one that waits.
func kill(p *testbed) error {
	fmt.Printf("\nkill: SIGKILL of the node in the middle of %d answers of %d tokens\n", p.slots, p.longest)
	second, err := p.startNode("n2")
	if err != nil {
		return err
	}
	if err := p.until("two nodes are alive", func() (bool, error) {
		var nodes int
		err := p.pool.QueryRow(p.ctx, `SELECT count(*) FROM penstock.node WHERE name IN ('n1', 'n2')`).Scan(&nodes)
		return nodes == 2, err
	}); err != nil {
		return err
	}
	if err := second.cmd.Process.Signal(syscall.SIGSTOP); err != nil { // it shall not take entries yet
		return err
	}
	pushed, err := p.push(p.slots, func() int { return p.longest }, "kill")
	if err != nil {
		return err
	}
	if err := p.active(p.slots); err != nil {
		return err
	}
	if err := second.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		return err
	}
	time.Sleep(time.Second) // the answers are in their middle
	killed := time.Now()
	if err := p.node.cmd.Process.Kill(); err != nil {
		return err
	}
	_ = p.node.cmd.Wait()
	p.node = second
	if err := p.runAgain(pushed, killed); err != nil {
		return err
	}
	var crashes, most int
	if err := p.pool.QueryRow(p.ctx, `SELECT coalesce(sum(crashes), 0), coalesce(max(crashes), 0) FROM penstock.entry`).
		Scan(&crashes, &most); err != nil {
		return err
	}
	fmt.Printf("crashes of the entries: %d in all, %d at most of one\n", crashes, most)
	if err := p.until("the queue is empty", func() (bool, error) {
		var left int
		err := p.pool.QueryRow(p.ctx, `SELECT count(*) FROM penstock.entry`).Scan(&left)
		return left == 0, err
	}); err != nil {
		return err
	}
	return p.judgeKill(pushed, killed)
}

// runAgain waits until all entries that had not ended when the node was killed have begun again.
func (p *testbed) runAgain(pushed []invalidation.Pushed, killed time.Time) error {
	return p.until("all run again", func() (bool, error) {
		time.Sleep(100 * time.Millisecond) // the log is read each time
		events, err := p.events()
		settled := map[string]bool{}
		for _, e := range events {
			ended := e.Event == "end" && e.At < seconds(killed)
			if ended || e.Event == "begin" && e.At > seconds(killed) {
				settled[e.Entry] = true
			}
		}
		left := 0
		for _, entry := range pushed {
			if !settled[entryID(entry)] {
				left++
			}
		}
		return left == 0, err
	})
}

// entryID is how the worker's log names an entry.
func entryID(entry invalidation.Pushed) string { return strconv.FormatInt(int64(entry.ID), 10) }

func (p *testbed) judgeKill(pushed []invalidation.Pushed, killed time.Time) error {
	var done, failed int
	ids := make([]int64, len(pushed))
	ours := map[string]bool{}
	for i, entry := range pushed {
		ids[i] = int64(entry.ID)
		ours[entryID(entry)] = true
	}
	err := p.pool.QueryRow(p.ctx, `
SELECT (SELECT count(*) FROM penstock.result WHERE entry_id = ANY ($1) AND outcome = 'done'),
       (SELECT count(*) FROM penstock.failure WHERE entry_id = ANY ($1))`, ids).Scan(&done, &failed)
	if err != nil {
		return err
	}
	events, err := p.events()
	if err != nil {
		return err
	}
	var stopped, again []time.Duration
	running, together := map[string]int{}, 0
	for _, e := range events {
		if !ours[e.Entry] {
			continue
		}
		after := time.Duration((e.At - seconds(killed)) * float64(time.Second))
		switch e.Event {
		case "begin":
			if running[e.Entry]++; running[e.Entry] > 1 {
				together++
			}
			if after > 0 {
				again = append(again, after)
			}
		case "stop":
			stopped = append(stopped, after)
			running[e.Entry]--
		case "end":
			running[e.Entry]--
		}
	}
	slices.Sort(stopped)
	slices.Sort(again)
	fmt.Printf("the worker stopped %d runs, the last %.1f ms after the kill\n", len(stopped), quantile(stopped, 1))
	fmt.Printf("%d began again, the first %.2f s and the last %.2f s after the kill\n", len(again),
		quantile(again, 0)/1000, quantile(again, 1)/1000)
	fmt.Printf("%d of %d done, %d failed; %d times two runs of an entry at once\n", done, len(pushed), failed, together)
	return nil
}
