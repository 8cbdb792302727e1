package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// reading makes c a command that reads and prints, with --watch to do so again and again.
func reading(a *app, c *cobra.Command, read func(ctx context.Context, api conn, args []string) error) *cobra.Command {
	every := watchFlag(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		api, err := a.connect(c.Context())
		if err != nil {
			return err
		}
		return a.watch(c.Context(), *every, func() error { return read(c.Context(), api, args) })
	}
	return c
}

// watchFlag adds --watch to a command that reads.
func watchFlag(c *cobra.Command) *time.Duration {
	every := c.Flags().Duration("watch", 0, "print again every so often, until interrupted")
	c.Flags().Lookup("watch").NoOptDefVal = "2s"
	return every
}

// showing makes c a command that prints one thing; write is its form for people.
func showing[T any](a *app, c *cobra.Command, read func(ctx context.Context, api conn, args []string) (T, error),
	write func(io.Writer, T),
) *cobra.Command {
	return reading(a, c, func(ctx context.Context, api conn, args []string) error {
		found, err := read(ctx, api, args)
		if err != nil {
			return err
		}
		return printOne(a, found, func(w io.Writer) { write(w, found) })
	})
}

// ofEntry reads what there is about the entry whose id is the argument.
func ofEntry[T any](
	read func(context.Context, conn, int64) (T, error),
) func(context.Context, conn, []string) (found T, err error) {
	return func(ctx context.Context, api conn, args []string) (found T, err error) {
		ids, err := entryIDs(args)
		if err != nil {
			return found, err
		}
		return read(ctx, api, ids[0])
	}
}

// listing makes c a command that prints a whole list.
func listing[T any](a *app, c *cobra.Command, columns []column[T],
	read func(ctx context.Context, api conn, args []string) ([]T, error),
) *cobra.Command {
	all := 0
	return paging(a, c, &all, columns, read, nil)
}

// paging makes c a command that prints a list up to a limit, 0 for all, and says on the error stream which flag asks
// for what comes behind the last row of a full page. Without next that is --limit.
func paging[T any](a *app, c *cobra.Command, limit *int, columns []column[T],
	read func(ctx context.Context, api conn, args []string) ([]T, error), next func(last T) string,
) *cobra.Command {
	return reading(a, c, func(ctx context.Context, api conn, args []string) error {
		found, err := read(ctx, api, args)
		if err != nil {
			return err
		}
		if err := printList(a, columns, found); err != nil {
			return err
		}
		if next == nil {
			next = func(T) string { return pageHint(*limit, operator.PageMax) }
		}
		if len(found) > 0 && len(found) == *limit {
			fmt.Fprintf(a.err, "there may be more: %s\n", next(found[len(found)-1]))
		}
		return nil
	})
}

// pageHint names the flag that asks for more than a full page of limit rows, of a list of at most so many.
func pageHint(limit, most int) string {
	if limit < most {
		return fmt.Sprintf("--limit, up to %d", most)
	}
	return fmt.Sprintf("a command prints at most %d rows of this list", most)
}

// watch runs print once, or every so often until the context ends, which is then not an error. On a terminal each
// picture takes the place of the one before.
func (a *app) watch(ctx context.Context, every time.Duration, print func() error) error {
	if every <= 0 {
		return print()
	}
	for {
		if terminal(a.out) && a.tabular() {
			fmt.Fprintf(a.out, "\x1b[H\x1b[2Jevery %s, %s\n\n", every, a.now().Format("15:04:05"))
		}
		if err := print(); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			if !isA[exitStatus](err) { // what it found now may be gone with the next picture
				return err
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(every):
		}
		if a.tabular() {
			fmt.Fprintln(a.out)
		}
	}
}

// change is what a command that changes something has to say about one run.
type change struct {
	does   string // "pause queue mail": for the question, the dry run and the report
	detail string // what it means, for the question
	risky  bool   // ask first
	// check returns an error where an object of the change is missing. Nil: plan has read them. It is for a dry run and
	// before a question; elsewhere do finds out.
	check func(ctx context.Context) error
	// do carries it out and returns what is worth telling, empty for nothing.
	do func(ctx context.Context, by invalidation.By) (string, error)
}

// String says what the change does and what it means.
func (c change) String() string {
	if c.detail == "" {
		return c.does
	}
	return c.does + " (" + c.detail + ")"
}

// done is the report about a change, for programs.
type done struct {
	Did    string `json:"did"`
	DryRun bool   `json:"dry_run,omitempty"`
	Answer string `json:"answer,omitempty"`
}

// changing makes c a command that changes something: it needs a reason, takes --dry-run, and asks first where
// the change is risky. plan looks at the arguments and reads what it needs; it changes nothing.
func changing(a *app, c *cobra.Command,
	plan func(ctx context.Context, api conn, args []string) (change, error),
) *cobra.Command {
	var reason string
	var yes, dry bool
	c.Flags().StringVar(&reason, "reason", "", "why, for the audit (required)")
	c.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	c.Flags().BoolVar(&dry, "dry-run", false, "say what would change, and change nothing")
	must(c.RegisterFlagCompletionFunc("reason", cobra.NoFileCompletions))
	c.RunE = func(c *cobra.Command, args []string) error {
		ctx := c.Context()
		if strings.TrimSpace(reason) == "" && !dry {
			return usagef("%s changes behaviour: say why with --reason, it goes into the audit", c.CommandPath())
		}
		api, err := a.connect(ctx)
		if err != nil {
			return err
		}
		planned, err := plan(ctx, api, args)
		if err != nil {
			return err
		}
		if planned.check != nil && (dry || planned.risky && !yes) {
			// Only what is not there stops a change: an entry that cannot be read can be cancelled.
			if err := planned.check(ctx); err != nil {
				if code, _ := kindOf(err); dry || code == exitNotFound {
					return err
				}
			}
		}
		if dry {
			return printOne(a, done{Did: planned.does, DryRun: true, Answer: planned.detail}, func(w io.Writer) {
				fmt.Fprintf(w, "would %s%s\n", planned.does, after(": ", planned.detail))
			})
		}
		if planned.risky && !yes {
			if err := a.confirm(planned); err != nil {
				return err
			}
		}
		answer, err := planned.do(ctx, invalidation.By{Actor: a.actor, Reason: reason})
		if err != nil {
			return err
		}
		return printOne(a, done{Did: planned.does, Answer: answer}, func(w io.Writer) {
			fmt.Fprintf(w, "%s: %s\n", planned.does, cmp.Or(answer, "done"))
		})
	}
	return c
}

// confirm asks on the terminal. Where there is none, the answer is no.
func (a *app) confirm(c change) error {
	if !terminal(a.in) {
		return fmt.Errorf("%s: %w", c, errUnconfirmed)
	}
	fmt.Fprintf(a.err, "%s? [y/N] ", c)
	line, err := bufio.NewReader(a.in).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("read answer: %w", err)
	}
	if s := strings.ToLower(strings.TrimSpace(line)); s == "y" || s == "yes" {
		return nil
	}
	return fmt.Errorf("%s: %w", c.does, errUnconfirmed)
}

// after is prefix and text, nothing if there is no text.
func after(prefix, text string) string {
	if text == "" {
		return ""
	}
	return prefix + text
}

// simple is the plan of a change that needs nothing but its arguments, and has nothing to tell.
func simple(does, detail string, risky bool, do func(ctx context.Context, by invalidation.By) error) (change, error) {
	return change{
		does: does, detail: detail, risky: risky,
		do: func(ctx context.Context, by invalidation.By) (string, error) { return "", do(ctx, by) },
	}, nil
}

// checked is simple with a check.
func checked(check func(ctx context.Context) error, does, detail string, risky bool,
	do func(ctx context.Context, by invalidation.By) error,
) (change, error) {
	c, err := simple(does, detail, risky, do)
	c.check = check
	return c, err
}

// among returns invalidation.ErrNotFound unless the list of a route has a thing. Filters are pairs as in query.
func among[T any](ctx context.Context, api conn, path, thing string, is func(T) bool, filters ...any) error {
	found, err := everything[T](ctx, api, path, filters...)
	if err == nil && !slices.ContainsFunc(found, is) {
		err = fmt.Errorf("%s: %w", thing, invalidation.ErrNotFound)
	}
	return err
}

// doing makes c a command of a verb on the object that find returns for the argument; detail prints its state.
func doing(a *app, c *cobra.Command, v operator.Verb, risky bool,
	find func(ctx context.Context, api conn, arg string) (thing any, detail string, err error),
) *cobra.Command {
	c.Args = cobra.ExactArgs(1)
	var until string
	if v.Pauses() {
		c.Flags().StringVar(&until, "until", "", "a time, or a duration from now, at which the pause ends by itself")
	}
	return changing(a, c, func(ctx context.Context, api conn, args []string) (change, error) {
		end, err := moment("until", until)
		if err != nil {
			return change{}, err
		}
		thing, detail, err := find(ctx, api, args[0])
		if err != nil {
			return change{}, err
		}
		detail = strings.TrimPrefix(detail+after(", ", inWords(end)), ", ")
		return change{
			does: fmt.Sprintf("%s %v", v, thing), detail: detail, risky: risky,
			do: func(ctx context.Context, by invalidation.By) (string, error) {
				return api.carryOut(ctx, v, thing, by, end)
			},
		}, nil
	})
}

// entryIDs reads ids; "#17" is as good as "17", since lock keys of solo entries are written so.
func entryIDs(args []string) ([]int64, error) {
	ids := make([]int64, len(args))
	for i, arg := range args {
		id, err := strconv.ParseInt(strings.TrimPrefix(arg, "#"), 10, 64)
		if err != nil || id <= 0 {
			return nil, usagef("%q is not the id of an entry", arg)
		}
		ids[i] = id
	}
	return ids, nil
}

// moment reads a time: RFC 3339, or a duration from now (10m, 2h), which is sent as such.
func moment(flag, text string) (operator.Moment, error) {
	var m operator.Moment
	if text == "" {
		return m, nil
	}
	if err := m.UnmarshalText([]byte(text)); err != nil {
		return m, usagef("--%s is %q: want a time like 2006-01-02T15:04:05Z, or a duration above 0 from now "+
			"like 10m",
			flag, text)
	}
	return m, nil
}

// inWords says when something ends: until 2026-01-31T12:00:00Z, or for 30m0s; empty: it has no end.
func inWords(end operator.Moment) string {
	if end.In > 0 {
		return "for " + end.In.String()
	}
	return after("until ", stamp(&end.Time))
}

// hour reads the beginning of an hour for a query: a date, RFC 3339, or a duration before now (24h).
func (a *app) hour(flag, text string) (string, error) {
	if text == "" {
		return "", nil
	}
	if d, err := time.ParseDuration(text); err == nil {
		return a.now().Add(-d).UTC().Format(time.RFC3339), nil
	}
	for _, layout := range []string{time.DateOnly, time.RFC3339} {
		if t, err := time.Parse(layout, text); err == nil {
			return t.Format(time.RFC3339), nil
		}
	}
	return "", usagef("--%s is %q: want a date like 2006-01-02, a time like 2006-01-02T15:00:00Z, "+
		"or a duration before now like 24h", flag, text)
}

// queueFlag adds --queue with completion.
func (a *app) queueFlag(c *cobra.Command, queue *string, help string) {
	c.Flags().StringVar(queue, "queue", "", help)
	must(c.RegisterFlagCompletionFunc("queue", anywhere(a.completeQueues())))
}

func settingFlag(c *cobra.Command, set *[]string, names []string) {
	c.Flags().StringArrayVar(set, "set", nil, "name=value of a setting; several times. Values are JSON, or text")
	must(c.RegisterFlagCompletionFunc("set", func(*cobra.Command, []string, string) ([]cobra.Completion,
		cobra.ShellCompDirective,
	) {
		choices := make([]string, len(names))
		for i, name := range names {
			choices[i] = name + "="
		}
		return choices, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
	}))
}

// readSettings turns name=value into options. What is JSON is taken as JSON, the rest as text: 10, true,
// {"base": 2}, 1 day.
func readSettings(set []string) (map[string]any, error) {
	options := map[string]any{}
	for _, pair := range set {
		name, value, found := strings.Cut(pair, "=")
		if !found || name == "" {
			return nil, usagef("--set is %q: want name=value", pair)
		}
		var parsed any
		if json.Unmarshal([]byte(value), &parsed) != nil {
			parsed = value
		}
		options[name] = parsed
	}
	return options, nil
}

// described lists options in their order, as they were given.
func described(options map[string]any) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(options)) {
		text, err := json.Marshal(options[name])
		if err != nil {
			text = fmt.Append(nil, options[name])
		}
		parts = append(parts, name+"="+string(text))
	}
	return strings.Join(parts, " ")
}
