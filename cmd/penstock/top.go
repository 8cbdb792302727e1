package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/operator"
)

func topCommand(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "top", Short: "The live system: queues, lanes, nodes, locks, rates", Args: cobra.NoArgs,
		Long: "The live system in a terminal, or once as text. Rates are what came into and left a queue's table; " +
			"they lag by about a\n" +
			"second. Keys: tab or 1-4 choose the page, s the order of queues, arrows scroll, space freezes, +/- the " +
			"pace, q quits.",
	}
	var once bool
	var every time.Duration
	c.Flags().BoolVar(&once, "once", false, "print one picture and exit; so too where the output is not a terminal")
	c.Flags().DurationVar(&every, "interval", 2*time.Second,
		"between two pictures; with --once the time over which rates are measured that no leader has sampled")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if every < 100*time.Millisecond {
			return usagef("--interval is %s: want at least 100ms", every)
		}
		api, err := a.connect(c.Context())
		if err != nil {
			return err
		}
		if once || !terminal(a.out) || !terminal(a.in) || !a.tabular() {
			return a.topOnce(c.Context(), api.snapshot, every)
		}
		_, err = tea.NewProgram(newTop(c.Context(), a, api.snapshot, every), tea.WithContext(c.Context()),
			tea.WithInput(a.in), tea.WithOutput(a.out.Writer)).Run()
		if errors.Is(err, tea.ErrInterrupted) || errors.Is(err, tea.ErrProgramKilled) {
			return nil
		}
		return err
	}
	return c
}

// topOnce prints one picture. It waits for a second snapshot, for rates, only where a queue was not sampled by
// the leader.
func (a *app) topOnce(ctx context.Context, read snapshotReader, over time.Duration) error {
	s, err := read(ctx, nil)
	if err != nil {
		return err
	}
	unsampled := func(q operator.Queue) bool { return q.SampledAt == nil }
	if slices.ContainsFunc(s.Queues, unsampled) {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(over):
		}
		if s, err = read(ctx, s); err != nil {
			return err
		}
	}
	if !a.tabular() {
		return a.encode(s)
	}
	_, err = fmt.Fprint(a.out, a.topPicture(s))
	return err
}

// snapshotReader reads the live system. Its rates are measured since the earlier snapshot, nil for none.
type snapshotReader func(ctx context.Context, earlier *operator.Snapshot) (*operator.Snapshot, error)

// snapshot reads the live system, and computes the rates, since only the caller has the earlier snapshot.
func (c conn) snapshot(ctx context.Context, earlier *operator.Snapshot) (*operator.Snapshot, error) {
	s, err := get[operator.Snapshot](ctx, c, "/v1/snapshot")
	if err != nil {
		return nil, err
	}
	s.Rates = operator.Rates(earlier, &s)
	return &s, nil
}

// top is the live view: a model that messages change and that draws itself.
type top struct {
	a     *app
	ctx   context.Context //nolint:containedctx // bubbletea's commands are functions without arguments
	read  snapshotReader
	every time.Duration

	snapshot      *operator.Snapshot
	past          []*operator.Snapshot // of the last rateSpan, the oldest first
	err           error
	page, order   int
	offset        int
	width, height int
	frozen        bool
}

// arrived is a snapshot that was read, or why it could not be.
type arrived struct {
	snapshot *operator.Snapshot
	err      error
}

// due says that it is time for the next snapshot.
type due struct{}

// The pace of the live view stays within these.
const (
	everyMin = 250 * time.Millisecond
	everyMax = time.Minute
)

func newTop(ctx context.Context, a *app, read snapshotReader, every time.Duration) *top {
	return &top{a: a, ctx: ctx, read: read, every: every, width: 120, height: 40}
}

// rateSpan is the time over which rates are measured: the counters behind them move about once a second.
const rateSpan = 5 * time.Second

// Init reads the first snapshot.
func (t *top) Init() tea.Cmd { return t.next() }

// next takes at most ten seconds: a view that does not change must say why.
func (t *top) next() tea.Cmd {
	var earlier *operator.Snapshot
	if len(t.past) > 0 {
		earlier = t.past[0]
	}
	return func() tea.Msg {
		ctx, cancel := context.WithTimeout(t.ctx, 10*time.Second)
		defer cancel()
		s, err := t.read(ctx, earlier)
		return arrived{s, err}
	}
}

// remember keeps a snapshot for the rates of those to come.
func (t *top) remember(s *operator.Snapshot) {
	t.past = append(t.past, s)
	for len(t.past) > 1 && s.At.Sub(t.past[1].At) >= rateSpan {
		t.past = t.past[1:]
	}
}

// Update changes the model by one message.
func (t *top) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		t.width, t.height = msg.Width, msg.Height
	case arrived:
		if t.err = msg.err; msg.err == nil {
			t.remember(msg.snapshot)
			if !t.frozen {
				t.snapshot = msg.snapshot
			}
		}
		return t, tea.Tick(t.every, func(time.Time) tea.Msg { return due{} })
	case due:
		return t, t.next()
	case tea.KeyPressMsg:
		return t, t.press(msg.String())
	}
	return t, nil
}

func (t *top) press(key string) tea.Cmd {
	switch key {
	case "q", "esc", "ctrl+c":
		return tea.Quit
	case "tab", "right":
		t.page, t.offset = (t.page+1)%len(pages), 0
	case "shift+tab", "left":
		t.page, t.offset = (t.page+len(pages)-1)%len(pages), 0
	case "1", "2", "3", "4":
		t.page, t.offset = int(key[0]-'1'), 0
	case "s":
		t.order = (t.order + 1) % len(orders)
	case "space":
		t.frozen = !t.frozen
	case "+":
		t.every = max(t.every/2, everyMin)
	case "-":
		t.every = min(t.every*2, everyMax)
	case "down", "j":
		t.offset++
	case "up", "k":
		t.offset = max(0, t.offset-1)
	case "pgdown":
		t.offset += max(1, t.height-6)
	case "pgup":
		t.offset = max(0, t.offset-max(1, t.height-6))
	case "home":
		t.offset = 0
	}
	return nil
}

// View draws the model on the whole terminal.
func (t *top) View() tea.View {
	v := tea.NewView(t.draw())
	v.AltScreen, v.WindowTitle = true, "penstock top"
	return v
}
