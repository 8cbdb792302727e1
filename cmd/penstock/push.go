package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/invalidation"
)

const pushHelp = `Push one entry, whose payload is the second argument (JSON), @FILE, or - for standard input;
or many with --lines FILE (- for standard input), a payload a line, which are pushed 1,000 at a time.
Times are RFC 3339, or durations from now.`

// A push of lines is sent in requests of at most pushBatch entries and about pushBytes, each accepted whole
// or not at all.
const (
	pushBatch = 1000
	pushBytes = 8 << 20
)

// lineMax bounds a line of --lines, far above the largest payload a queue can take.
const lineMax = 32 << 20

type pushFlags struct {
	push                    invalidation.Push
	priority                int16
	due, startBy, finishBy  string
	policy, callback, lines string
	wait                    bool
}

func entryPush(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "push QUEUE [PAYLOAD]", Short: "Push entries", Long: pushHelp, Args: cobra.RangeArgs(1, 2),
		ValidArgsFunction: a.completeQueues,
		Example: "  penstock entry push mails '{\"to\": \"ada\"}' --lock-key ada --wait\n  penstock entry " +
			"push mails --lines mails.ndjson",
	}
	var f pushFlags
	flags := c.Flags()
	flags.StringVar(&f.push.LockKey, "lock-key", "", "entries with the same lock key run one after another")
	flags.StringVar(&f.push.Flow, "flow", "", "whose work it is")
	flags.Int16Var(&f.priority, "priority", 0, "0 to 9, higher first; the queue's default if not given")
	flags.StringVar(&f.due, "due", "", "not before")
	flags.StringVar(&f.startBy, "start-by", "", "expires if not started by then")
	flags.StringVar(&f.finishBy, "finish-by", "", "expires if not finished by then")
	flags.Float64Var(&f.push.Cost, "cost", 0, "in the units that the queue's fairness counts")
	flags.Int32Var(&f.push.Weight, "weight", 0,
		"times the units of each limit of the queue, at most its max_weight; 0 for 1")
	flags.StringVar(&f.push.Name, "name", "", "by which entries can be listed and disabled")
	flags.StringVar(&f.push.IdempotencyKey, "idempotency-key", "",
		"a second push with this key gets the first one's entry")
	flags.StringVar(&f.push.UniqueKey, "unique-key", "", "keeps an entry from being queued twice")
	flags.StringVar(&f.policy, "unique-policy", "", "while_queued, while_active or one_running_one_queued")
	flags.StringVar(&f.push.Trace, "trace", "", "W3C traceparent")
	flags.StringVar(&f.callback, "callback", "", "JSON: where to report the outcome")
	flags.StringVar(&f.lines, "lines", "", "file with a payload a line")
	flags.BoolVar(&f.wait, "wait", false, "wait for the outcome, as entry wait does")
	must(c.RegisterFlagCompletionFunc("unique-policy", cobra.FixedCompletions(
		[]string{"while_queued", "while_active", "one_running_one_queued"}, cobra.ShellCompDirectiveNoFileComp)))
	c.RunE = func(c *cobra.Command, args []string) error {
		api, err := a.connect(c.Context())
		if err != nil {
			return err
		}
		template, err := f.template(a)
		if flags.Changed("priority") {
			template.Priority = &f.priority
		}
		if err != nil {
			return err
		}
		switch {
		case f.lines != "" && (len(args) == 2 || f.wait || template.IdempotencyKey != "" || template.UniqueKey != ""):
			return usagef("--lines goes with neither a payload, --wait, --idempotency-key nor --unique-key")
		case f.lines != "":
			return a.pushLines(c.Context(), api, args[0], f.lines, template)
		case len(args) < 2:
			return usagef("give a payload, @FILE, - for standard input, or --lines FILE")
		}
		return a.pushOne(c.Context(), api, args[0], args[1], template, f.wait)
	}
	return c
}

// template is the push with everything but its payload.
func (f *pushFlags) template(a *app) (invalidation.Push, error) {
	p := f.push
	var err, errs error
	for _, t := range []struct {
		flag, text string
		to         *time.Time
	}{{"due", f.due, &p.DueAt}, {"start-by", f.startBy, &p.StartBy}, {"finish-by", f.finishBy, &p.FinishBy}} {
		*t.to, err = a.moment(t.flag, t.text)
		errs = errors.Join(errs, err)
	}
	p.UniquePolicy = invalidation.UniquePolicy(f.policy)
	if f.callback != "" {
		p.Callback = json.RawMessage(f.callback)
		if !json.Valid(p.Callback) {
			errs = errors.Join(errs, usagef("--callback is not JSON"))
		}
	}
	return p, errs
}

func (a *app) pushOne(ctx context.Context, api conn, queue, payload string, p invalidation.Push, wait bool) error {
	text, err := a.document("the payload", payload)
	if err != nil {
		return err
	}
	p.Payload = text
	pushed, err := api.push(ctx, queue, p)
	if err != nil {
		return err
	}
	if wait {
		return a.await(ctx, api, []int64{int64(pushed[0].ID)}, 0)
	}
	return printOne(a, pushed[0], func(w io.Writer) { fmt.Fprintf(w, "%d %s\n", pushed[0].ID, pushed[0].Verdict) })
}

// pushedLines is the report of a push of many.
type pushedLines struct {
	Entries int   `json:"entries"`
	FirstID int64 `json:"first_id"`
	LastID  int64 `json:"last_id"`
}

// pushLines pushes a payload a line in constant memory. An error names the line, and says what was accepted before it.
func (a *app) pushLines(ctx context.Context, api conn, queue, path string, template invalidation.Push) error {
	source, size := a.in, int64(-1)
	if path != "-" {
		file, err := os.Open(path)
		if err != nil {
			return fmt.Errorf("read payloads: %w", err)
		}
		defer file.Close()
		if info, err := file.Stat(); err == nil {
			size = info.Size()
		}
		source = file
	}
	bar := a.progress(size, "push")
	defer bar.end()
	scanner := bufio.NewScanner(source)
	scanner.Buffer(make([]byte, 64<<10), lineMax)
	var report pushedLines
	var batch []invalidation.Push
	line, first, batchBytes, bytesRead := 0, 1, 0, int64(0)
	flush := func() error {
		if len(batch) == 0 {
			return nil
		}
		pushed, err := api.push(ctx, queue, batch...)
		if err != nil {
			return fmt.Errorf("lines %d to %d were not accepted, the %d entries before them were: %w", first, line,
				report.Entries, err)
		}
		if report.Entries == 0 {
			report.FirstID = int64(pushed[0].ID)
		}
		report.Entries += len(pushed)
		report.LastID = int64(pushed[len(pushed)-1].ID)
		batch, batchBytes, first = batch[:0], 0, line+1
		bar.set(bytesRead)
		return nil
	}
	for scanner.Scan() {
		line++
		bytesRead += int64(len(scanner.Bytes())) + 1
		text := bytes.TrimSpace(scanner.Bytes())
		if len(text) == 0 {
			continue
		}
		if !json.Valid(text) {
			return usagef("line %d is not JSON; %d entries before line %d were accepted", line, report.Entries, first)
		}
		p := template
		p.Payload = bytes.Clone(text)
		batch, batchBytes = append(batch, p), batchBytes+len(text)
		if len(batch) == pushBatch || batchBytes >= pushBytes {
			if err := flush(); err != nil {
				return err
			}
		}
	}
	if err := scanner.Err(); err != nil {
		return fmt.Errorf("read line %d; %d entries before line %d were accepted: %w", line+1, report.Entries,
			first, err)
	}
	if err := flush(); err != nil {
		return err
	}
	bar.end()
	return printOne(a, report, func(w io.Writer) {
		fmt.Fprintf(w, "%d entries, ids %d to %d\n", report.Entries, report.FirstID, report.LastID)
	})
}

// document reads JSON from an argument, @FILE, or standard input (-).
func (a *app) document(what, arg string) ([]byte, error) {
	text := []byte(arg)
	var err error
	switch {
	case arg == "-":
		text, err = io.ReadAll(io.LimitReader(a.in, lineMax))
	case strings.HasPrefix(arg, "@"):
		text, err = os.ReadFile(arg[1:])
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", what, err)
	}
	if !json.Valid(text) {
		return nil, usagef("%s is not JSON: %s", what, short(string(text), 60))
	}
	return text, nil
}

// object is a document that is a JSON object.
func (a *app) object(what, arg string) ([]byte, error) {
	text, err := a.document(what, arg)
	if err != nil {
		return nil, err
	}
	var object map[string]any
	if err := json.Unmarshal(text, &object); err != nil {
		return nil, usagef("%s is not a JSON object: %w", what, err)
	}
	return text, nil
}
