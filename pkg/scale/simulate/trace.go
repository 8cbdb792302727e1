package simulate

import (
	"cmp"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"time"
)

// Request is one request of a load.
type Request struct {
	At      float64 // seconds since the begin of the load
	Service float64 // seconds that it holds a slot
}

// Load is a sequence of requests of one model, ordered by time, and the instances that may serve it.
type Load struct {
	Name     string
	Requests []Request
	Slots    int     // of one instance
	Max      int     // instances
	SLO      float64 // seconds that a request may wait
	Cold     float64 // seconds that a start takes
	Warm     float64 // seconds at the begin that are played and not counted
	Tail     float64 // seconds that are simulated after the last request

	// Bound gives each request to an instance when it arrives, the one with the fewest requests, and it waits there: as
	// behind a Service of Kubernetes, and not in one queue for all.
	Bound bool
}

// Span is the simulated time in seconds.
func (l Load) Span() float64 {
	if len(l.Requests) == 0 {
		return l.Tail
	}
	return math.Ceil(l.Requests[len(l.Requests)-1].At) + l.Tail
}

// Times returns the load with each request n times.
func (l Load) Times(n int) Load {
	all := make([]Request, 0, n*len(l.Requests))
	for _, r := range l.Requests {
		for range n {
			all = append(all, r)
		}
	}
	l.Requests = all
	return l
}

// ErrTrace wraps each error about the content of a trace.
var ErrTrace = errors.New("trace is not readable")

// Window is a part of a trace. A bound that is zero is none.
type Window struct {
	From  time.Time
	Until time.Time // not included
}

func (w Window) has(at time.Time) bool {
	return (w.From.IsZero() || !at.Before(w.From)) && (w.Until.IsZero() || at.Before(w.Until))
}

// Read reads a window of a trace by its header: TIMESTAMP, ContextTokens, GeneratedTokens (Azure's LLM
// traces: one load), gmt_create, exec_time_seconds, checkpoint_model_version_id (Alibaba's GenAI trace: one
// load a model, those that are busiest in the window first), or at, service, model (Penstock's own: seconds,
// seconds and a name).
func Read(path string, window Window) ([]Load, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open trace: %w", err)
	}
	defer file.Close()
	loads, err := read(file, window)
	if err != nil {
		return nil, fmt.Errorf("read trace %s: %w", path, err)
	}
	return loads, nil
}

func read(from io.Reader, window Window) ([]Load, error) {
	lines := csv.NewReader(from)
	lines.ReuseRecord = true
	header, err := lines.Read()
	if err != nil {
		return nil, fmt.Errorf("header: %w", err)
	}
	parse, err := parser(header)
	if err != nil {
		return nil, err
	}
	byModel := map[string][]Request{}
	first := math.Inf(1)
	for {
		line, err := lines.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		model, at, service, err := parse(line)
		if err != nil {
			row, _ := lines.FieldPos(0)
			return nil, fmt.Errorf("line %d: %w: %w", row, err, ErrTrace)
		}
		if service <= 0 || !window.has(at) {
			continue
		}
		// Relative to a fixed time: the first one of the trace is known only at its end.
		seconds := at.Sub(epoch).Seconds()
		first = min(first, seconds)
		byModel[model] = append(byModel[model], Request{At: seconds, Service: service})
	}
	if len(byModel) == 0 {
		return nil, fmt.Errorf("no request in the window: %w", ErrTrace)
	}
	return loadsOf(byModel, first), nil
}

// epoch is before all traces and near enough for a time.Duration.
var epoch = time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)

func loadsOf(byModel map[string][]Request, first float64) []Load {
	var loads []Load
	for model, requests := range byModel {
		for i := range requests {
			requests[i].At -= first
		}
		slices.SortStableFunc(requests, func(a, b Request) int { return cmp.Compare(a.At, b.At) })
		loads = append(loads, Load{Name: model, Requests: requests})
	}
	slices.SortFunc(loads, func(a, b Load) int {
		return cmp.Or(cmp.Compare(len(b.Requests), len(a.Requests)), cmp.Compare(a.Name, b.Name))
	})
	return loads
}

type parse func(line []string) (model string, at time.Time, service float64, err error)

func parser(header []string) (parse, error) {
	column := map[string]int{}
	for i, name := range header {
		column[name] = i
	}
	has := func(names ...string) bool {
		for _, name := range names {
			if _, there := column[name]; !there {
				return false
			}
		}
		return true
	}
	switch {
	case has("TIMESTAMP", "ContextTokens", "GeneratedTokens"):
		return azure(column["TIMESTAMP"], column["ContextTokens"], column["GeneratedTokens"]), nil
	case has("gmt_create", "exec_time_seconds", "checkpoint_model_version_id"):
		return alibaba(column["gmt_create"], column["exec_time_seconds"],
			column["checkpoint_model_version_id"]), nil
	case has("at", "service", "model"):
		return own(column["at"], column["service"], column["model"]), nil
	}
	return nil, fmt.Errorf("columns %q are those of no known trace: %w", header, ErrTrace)
}

// azure guesses the service time from the tokens: 0.5 s, 30 ms a token out, 0.5 ms a token in.
func azure(at, in, out int) parse {
	return func(line []string) (string, time.Time, float64, error) {
		when, err := time.Parse("2006-01-02 15:04:05.9999999", line[at])
		if err != nil {
			return "", time.Time{}, 0, err
		}
		tokensIn, errIn := strconv.ParseFloat(line[in], 64)
		tokensOut, errOut := strconv.ParseFloat(line[out], 64)
		return "", when, 0.5 + 0.030*tokensOut + 0.0005*tokensIn, errors.Join(errIn, errOut)
	}
}

func alibaba(at, service, model int) parse {
	return func(line []string) (string, time.Time, float64, error) {
		when, err := time.Parse(time.DateTime, line[at])
		if err != nil || line[service] == "" {
			return "", time.Time{}, 0, err
		}
		seconds, err := strconv.ParseFloat(line[service], 64)
		return line[model], when, seconds, err
	}
}

func own(at, service, model int) parse {
	return func(line []string) (string, time.Time, float64, error) {
		when, errAt := strconv.ParseFloat(line[at], 64)
		seconds, err := strconv.ParseFloat(line[service], 64)
		return line[model], epoch.Add(time.Duration(when * float64(time.Second))), seconds, errors.Join(errAt, err)
	}
}

// Bursty is a generated load: Poisson arrivals whose rate is four times the mean a fifth of the time.
func Bursty(seed uint64, rate, service, seconds float64) Load {
	random := rand.New(rand.NewPCG(seed, 2)) //nolint:gosec // a load must be the same each time
	load := Load{Name: "bursty"}
	high, until := false, 0.0
	for at := 0.0; at < seconds; {
		for at >= until {
			high = !high
			until += map[bool]float64{true: 60, false: 240}[high] * random.ExpFloat64()
		}
		now := rate / 4
		if high {
			now = 4 * rate
		}
		at += random.ExpFloat64() / now
		load.Requests = append(load.Requests, Request{At: at, Service: service * (0.5 + random.ExpFloat64()/2)})
	}
	return load
}
