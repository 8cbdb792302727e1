package main

import (
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/scale/simulate"
)

func scaleCommand(a *app) *cobra.Command {
	return noun("scale", "Autoscaling: how many instances each model has, and why",
		scaleStatus(a), scaleExplain(a), scaleHistory(a), scaleSet(a), scaleTemplate(a), scaleOverride(a),
		scaleDisable(a), scaleSimulate(a))
}

const simulateHelp = `Play a trace of requests against Penstock's autoscaler, those of others with their published
constants, fixed numbers of instances, and a bound that knows the future. The table has the share of requests
that waited longer than the SLO, and the GPU-hours of all instances, each at several settings, so that
frontiers can be compared.

A trace is a CSV file with a header: at, service, model (seconds, seconds, a name), or a public trace as it comes:
TIMESTAMP, ContextTokens, GeneratedTokens (Azure's LLM traces), or gmt_create, exec_time_seconds,
checkpoint_model_version_id (Alibaba's GenAI trace). Without a trace a bursty load is generated.`

// simulation is what the flags of simulate say.
type simulation struct {
	trace           string
	slots, max      int
	times, models   int
	slo, cold, warm time.Duration
	from, until     string
	zero, faults    bool
	bound           bool
	policies        []string
	picture         string
}

func scaleSimulate(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "simulate", Short: "Compare autoscalers on a trace of requests", Long: simulateHelp, Args: cobra.NoArgs,
		Example: "  penstock scale simulate --trace AzureLLMInferenceTrace_code.csv --times 3 --slots 4 --cold 90s",
	}
	var s simulation
	flags := c.Flags()
	flags.StringVar(&s.trace, "trace", "", "CSV file; empty: a generated load")
	flags.IntVar(&s.slots, "slots", 4, "requests that an instance runs at a time")
	flags.IntVar(&s.max, "max", 60, "instances of a model at most")
	flags.IntVar(&s.times, "times", 1, "each request so many times")
	flags.IntVar(&s.models, "models", 1, "so many of the busiest models of the trace")
	flags.DurationVar(&s.slo, "slo", 30*time.Second, "a request that waits longer is late")
	flags.DurationVar(&s.cold, "cold", 90*time.Second, "how long a start takes")
	flags.DurationVar(&s.warm, "warm-up", 0, "played first and not counted")
	flags.StringVar(&s.from, "from", "", "first moment of the trace, like 2024-11-19 or 2024-11-19T08:00:00Z")
	flags.StringVar(&s.until, "until", "", "the moment behind the last")
	flags.BoolVar(&s.zero, "to-zero", false, "models may have no instance, for sparse loads")
	flags.BoolVar(&s.faults, "faults", false, "cold starts vary, 5 % never end, an instance dies each hour")
	flags.BoolVar(&s.bound, "bound", false,
		"under HPA, KEDA and Knative a request waits at the instance that it is given to as it arrives")
	flags.StringArrayVar(&s.policies, "policy", nil,
		"only policies whose name begins with this, like hpa; may be repeated")
	flags.StringVar(&s.picture, "picture", "", "write the frontiers to this file as SVG")
	c.RunE = func(c *cobra.Command, _ []string) error {
		loads, err := s.loads()
		if err != nil {
			return err
		}
		contenders, err := simulate.Named(simulate.Contenders(loads[0], s.zero), s.policies)
		if err != nil {
			return usageError{fmt.Errorf("--policy: %w", err)}
		}
		played := make(chan []simulate.Point, 1)
		go func() { played <- simulate.Compare(loads, s.fate(), contenders) }() // ends with the program
		var points []simulate.Point
		select {
		case points = <-played:
		case <-c.Context().Done():
			return c.Context().Err()
		}
		if s.picture != "" {
			if err := s.draw(points); err != nil {
				return err
			}
		}
		if a.tabular() {
			return simulate.Write(a.out, points)
		}
		return json.NewEncoder(a.out).Encode(points)
	}
	return c
}

func (s simulation) loads() ([]simulate.Load, error) {
	if s.slots < 1 || s.max < 1 || s.times < 1 || s.models < 1 || s.slo <= 0 || s.cold <= 0 || s.warm < 0 {
		return nil, usagef("want --slots, --max, --times and --models of 1 or more, and --slo and --cold above 0")
	}
	loads := []simulate.Load{simulate.Bursty(1, 4, 2.5, (2 * time.Hour).Seconds())}
	if s.trace != "" {
		var err error
		if loads, err = s.read(); err != nil {
			return nil, usageError{err}
		}
	}
	loads = loads[:min(s.models, len(loads))]
	for i := range loads {
		l := loads[i].Times(s.times)
		l.Slots, l.Max, l.SLO, l.Cold, l.Warm = s.slots, s.max, s.slo.Seconds(), s.cold.Seconds(), s.warm.Seconds()
		l.Bound = s.bound
		l.Tail = s.slo.Seconds() // so that the last requests are late or not
		if s.zero {
			l.Tail = (2 * time.Hour).Seconds()
		}
		loads[i] = l
	}
	return loads, nil
}

func (s simulation) read() ([]simulate.Load, error) {
	var window simulate.Window
	for _, bound := range []struct {
		flag, text string
		into       *time.Time
	}{{"from", s.from, &window.From}, {"until", s.until, &window.Until}} {
		if bound.text == "" {
			continue
		}
		at, err := time.Parse(time.RFC3339, bound.text)
		if err != nil {
			at, err = time.Parse(time.DateOnly, bound.text)
		}
		if err != nil {
			return nil, fmt.Errorf("--%s %q: want 2024-11-19 or 2024-11-19T08:00:00Z", bound.flag, bound.text)
		}
		*bound.into = at
	}
	return simulate.Read(s.trace, window)
}

// fate is the faults of the fleet.
func (s simulation) fate() simulate.Faults {
	if !s.faults {
		return simulate.Faults{}
	}
	return simulate.Faults{ColdSpread: 0.3, Stuck: 0.05, DeathEvery: time.Hour.Seconds(), Seed: 1}
}

func (s simulation) draw(points []simulate.Point) (err error) {
	file, err := os.Create(s.picture)
	if err != nil {
		return fmt.Errorf("write the picture: %w", err)
	}
	defer func() {
		if closed := file.Close(); err == nil {
			err = closed
		}
	}()
	title := fmt.Sprintf("Late requests against GPU-hours: SLO %v, cold start %v, %d slots", s.slo, s.cold, s.slots)
	return simulate.Picture(file, title, points)
}
