package peers

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/penstock/penstock/bench/meter"
)

// Step tells a contender's process what to do.
type Step struct {
	Verb         string   `json:"verb"` // push, single, drain, sustained, pickup or left
	Entries      int      `json:"entries,omitempty"`
	GroupSize    int      `json:"group_size,omitempty"`
	Conns        int      `json:"conns,omitempty"`
	Seconds      float64  `json:"seconds,omitempty"`
	Settings     Settings `json:"settings,omitempty"`
	PayloadBytes int      `json:"payload_bytes"`
	Worker       string   `json:"worker,omitempty"` // of a pickup: the URL of a worker that may be called
	Shared       bool     `json:"shared,omitempty"` // other processes work on the same entries, see Tally
}

// Report is the last line of a contender's process.
type Report struct {
	Work
	ClientCPUSeconds float64 `json:"client_cpu_seconds"`
	ClientRSSBytes   int64   `json:"client_rss_bytes"` // the most it ever was
	Unsupported      bool    `json:"unsupported,omitempty"`
}

// The conversation, one JSON line each, the same for every language (peers/node/child.js is its other half):
//
//	child  -> parent  {"ready":true}     connected and migrated
//	parent -> child   any line           the parent has read its meters: go
//	child  -> parent  {"progress":{}}    in a shared step: Progress, whenever it has changed
//	parent -> child   any line           in a shared step: all its entries are handled
//	child  -> parent  a Report           and exit
const readyLine = `{"ready":true}`

// RunChild is the body of a contender's process: set up, say so, wait for a line, do the step, report.
func RunChild(ctx context.Context, c Contender, dsn string, step Step, in io.Reader, out io.Writer) error {
	if err := c.Setup(ctx, dsn, NewPayload(step.PayloadBytes)); err != nil {
		return fmt.Errorf("set up: %w", err)
	}
	defer c.Close()
	fmt.Fprintln(out, readyLine)
	words := bufio.NewReader(in)
	if _, err := words.ReadString('\n'); err != nil {
		return fmt.Errorf("wait for the line to begin: %w", err)
	}

	tally := newTally(step.Shared)
	before := meter.Self()
	followed := make(chan error, 1)
	if step.Shared {
		go func() { followed <- tally.follow(words, out) }()
	}
	work, err := perform(ctx, c, step, tally)
	after := meter.Self()
	if step.Shared && err == nil {
		err = <-followed
	}
	if err != nil && !errors.Is(err, ErrUnsupported) {
		return fmt.Errorf("%s: %w", step.Verb, err)
	}
	return json.NewEncoder(out).Encode(Report{
		Work:             work,
		ClientCPUSeconds: after.CPUSeconds - before.CPUSeconds,
		ClientRSSBytes:   after.RSSMaxBytes,
		Unsupported:      err != nil,
	})
}

func perform(ctx context.Context, c Contender, step Step, tally *Tally) (Work, error) {
	switch step.Verb {
	case "push":
		return c.BulkPush(ctx, step.Entries, step.GroupSize)
	case "single":
		return c.SinglePush(ctx, step.Conns, step.Entries, step.Settings)
	case "drain":
		tally.Expect(step.Entries)
		if step.GroupSize > 1 {
			return c.DrainGroups(ctx, tally)
		}
		return c.DrainSolo(ctx, tally)
	case "sustained":
		return c.Sustained(ctx, time.Duration(step.Seconds*float64(time.Second)), tally)
	case "pickup":
		return c.PickupLatency(ctx, step.Entries, step.Settings)
	case "left":
		n, err := c.Left(ctx)
		return Work{Entries: n}, err
	}
	return Work{}, fmt.Errorf("no such verb: %q", step.Verb)
}
