package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

const pushHelp = `Push one entry, whose payload is the second argument (JSON), @FILE, or - for standard input;
or many with --lines FILE (- for standard input), a payload a line, which are pushed 1,000 at a time. Where
that breaks off, the same command with the --idempotency-key that it printed pushes no line twice.
Times are RFC 3339, or durations from when the entry is accepted, by the database's clock.`

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
		ValidArgsFunction: a.completeQueues(),
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
		"a second push with this key gets the first one's entry; with --lines, the key and the number of the line")
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
		template, err := f.template()
		if flags.Changed("priority") {
			template.Priority = &f.priority
		}
		if err != nil {
			return err
		}
		switch {
		case f.lines != "" && (len(args) == 2 || f.wait || template.UniqueKey != ""):
			return usagef("--lines goes with neither a payload, --wait nor --unique-key")
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
func (f *pushFlags) template() (newEntry, error) {
	p := newEntry{Push: f.push}
	var errs error
	due := f.due
	if d, err := time.ParseDuration(due); err == nil && d <= 0 {
		due = "" // a time that has come: the entry is due at once
	}
	for _, t := range []struct {
		flag, text string
		to         *operator.Moment
	}{{"due", due, &p.DueAt}, {"start-by", f.startBy, &p.StartBy}, {"finish-by", f.finishBy, &p.FinishBy}} {
		var err error
		*t.to, err = moment(t.flag, t.text)
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

func (a *app) pushOne(ctx context.Context, api conn, queue, payload string, p newEntry, wait bool) error {
	text, err := a.document("the payload", payload)
	if err != nil {
		return err
	}
	p.Payload = text
	p.IdempotencyKey = cmp.Or(p.IdempotencyKey, rand.Text())
	pushed, err := api.push(ctx, queue, p)
	if err != nil {
		return err
	}
	if wait {
		fmt.Fprintf(a.err, "entry %d %s\n", pushed[0].ID, pushed[0].Verdict) // it is accepted, however the wait ends
		return a.await(ctx, api, []awaited{{id: int64(pushed[0].ID), key: p.IdempotencyKey, flow: p.Flow}}, 0)
	}
	return printOne(a, pushed[0], func(w io.Writer) { fmt.Fprintf(w, "%d %s\n", pushed[0].ID, pushed[0].Verdict) })
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
