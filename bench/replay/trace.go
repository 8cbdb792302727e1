// Package replay runs a trace of requests through simulated task nodes that rank lanes by pkg/fairness and
// share usage as real ones do, and says how long the tenants waited.
package replay

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"
)

// Request is one line of a trace.
type Request struct {
	At      float64 // seconds since the first one
	Tenant  string
	Model   string
	Service float64 // seconds that it held a slot
}

// Read reads the request trace of Alibaba's cluster-trace-v2026-GenAI (lora_request_trace.csv). Requests that never ran
// are left out.
func Read(r io.Reader) ([]Request, error) {
	rows := csv.NewReader(r)
	head, err := rows.Read()
	if err != nil {
		return nil, fmt.Errorf("read trace: %w", err)
	}
	column := map[string]int{}
	for _, name := range []string{"gmt_create", "groupId", "checkpoint_model_version_id", "exec_time_seconds"} {
		if column[name] = slices.Index(head, name); column[name] < 0 {
			return nil, fmt.Errorf("read trace: there is no column %q in %q", name, head)
		}
	}
	var trace []Request
	var start time.Time
	for {
		row, err := rows.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("read trace: %w", err)
		}
		at, err := time.Parse(time.DateTime, row[column["gmt_create"]])
		if err != nil {
			return nil, fmt.Errorf("read trace: %w", err)
		}
		service, err := strconv.ParseFloat(row[column["exec_time_seconds"]], 64)
		if err != nil || service <= 0 {
			continue
		}
		if start.IsZero() {
			start = at
		}
		trace = append(trace, Request{
			at.Sub(start).Seconds(), row[column["groupId"]],
			row[column["checkpoint_model_version_id"]], service,
		})
	}
	slices.SortStableFunc(trace, func(a, b Request) int { return int(math.Copysign(1, a.At-b.At)) })
	if len(trace) == 0 {
		return nil, errors.New("read trace: no request in it ever ran")
	}
	return trace, nil
}

// Made makes a trace up: of the tenants few push most, in bursts; service times are lognormal around 23 s.
func Made(requests int, seed uint64) []Request {
	random := rand.New(rand.NewPCG(seed, 1))
	zipf := rand.NewZipf(random, 1.3, 4, 999)
	trace := make([]Request, 0, requests)
	for at := 0.0; len(trace) < requests; at += random.ExpFloat64() * 60 {
		tenant := zipf.Uint64()
		burst := 1 + int(random.ExpFloat64()*200/float64(4+tenant))
		for i := range min(burst, requests-len(trace)) {
			trace = append(trace, Request{
				At: at + float64(i), Tenant: fmt.Sprintf("G%04d", tenant), Model: fmt.Sprintf("M%02d", tenant%20),
				Service: 23 * math.Exp(random.NormFloat64()*0.7),
			})
		}
	}
	slices.SortStableFunc(trace, func(a, b Request) int { return int(math.Copysign(1, a.At-b.At)) })
	return trace
}

// Squeeze moves requests together until so many slots would be busy for this part of the time, on average.
func Squeeze(trace []Request, slots int, load float64) {
	service := 0.0
	for _, r := range trace {
		service += r.Service
	}
	factor := service / (float64(slots) * load) / max(trace[len(trace)-1].At, 1)
	for i := range trace {
		trace[i].At *= factor
	}
}
