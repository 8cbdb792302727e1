package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// listen serves on a free port and says which.
func listen(h http.Handler) {
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // for the life of the process
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	fmt.Fprintf(os.Stderr, "listening on %s\n", l.Addr())
	_ = http.Serve(l, h) //nolint:gosec // loopback, for one measurement
}

// await returns the line of what a process says that has a sign in it, and goes on reading.
func await(out io.Reader, sign string) (string, error) {
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if line := lines.Text(); strings.Contains(line, sign) {
			go func() { _, _ = io.Copy(io.Discard, out) }()
			return line, nil
		}
	}
	return "", fmt.Errorf("it did not say %q", sign)
}

// wordBehind returns the word of a line that follows a sign; empty: there is none.
func wordBehind(line, sign string) string {
	_, rest, _ := strings.Cut(line, sign)
	word, _, _ := strings.Cut(rest, " ")
	return word
}

// ownTimes reads the gateway's own time of its requests so far, the bounds of the histogram that half of them and 99 of
// 100 are below, in microseconds.
func (p *process) ownTimes(ctx context.Context) (p50, p99 float64, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+p.debug+"/metrics", nil)
	if err != nil {
		return 0, 0, err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, 0, err
	}
	defer answer.Body.Close()
	var bounds, counts []float64
	lines := bufio.NewScanner(answer.Body)
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), " ")
		bound, is := strings.CutPrefix(name, `penstock_gateway_own_seconds_bucket{le="`)
		if !is {
			continue
		}
		le, err1 := strconv.ParseFloat(strings.TrimSuffix(bound, `"}`), 64)
		count, err2 := strconv.ParseFloat(value, 64)
		if err := errors.Join(err1, err2); err != nil {
			return 0, 0, err
		}
		bounds, counts = append(bounds, le*1e6), append(counts, count)
	}
	if len(counts) == 0 {
		return 0, 0, errors.New("the gateway has no histogram of its own time")
	}
	below := func(part float64) float64 {
		at := slices.IndexFunc(counts, func(n float64) bool { return n >= part*counts[len(counts)-1] })
		return bounds[at]
	}
	return below(0.5), below(0.99), lines.Err()
}

func (p *process) stop() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	_ = p.cmd.Wait()
}

// startWorker answers at once, or with a stream of 50 chunks a second.
func startWorker() *httptest.Server {
	whole := []byte(`{"choices":[{"message":{"content":"` + strings.Repeat("x", 900) +
		`"}}],"usage":{"prompt_tokens":9,"completion_tokens":9}}`)
	chunk := []byte("data: {\"choices\":[{\"delta\":{\"content\":\"" + strings.Repeat("y", 100) + "\"}}]}\n\n")
	return httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if !bytes.Contains(body, []byte(`"stream":true`)) {
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write(whole)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		flush := http.NewResponseController(w)
		ticks := time.NewTicker(20 * time.Millisecond)
		defer ticks.Stop()
		for range 250 {
			stamp := strconv.FormatInt(time.Now().UnixNano(), 10)
			_, _ = w.Write([]byte(": " + stamp + "\n"))
			_, _ = w.Write(chunk)
			if flush.Flush() != nil {
				return
			}
			select {
			case <-ticks.C:
			case <-r.Context().Done():
				return
			}
		}
		_, _ = w.Write([]byte("data: [DONE]\n\n"))
	}))
}

// load is one way to load a proxy. rate 0: as fast as clients can.
type load struct {
	name    string
	rate    int
	clients int
	body    []byte
	streams bool
	rounds  int
}

func loads() []load {
	body := func(size int, more string) []byte {
		return []byte(`{"model":"m",` + more + `"messages":[{"role":"user","content":"` +
			strings.Repeat("z", size) + `"}]}`)
	}
	return []load{
		{name: "whole", rate: 2000, clients: 64, body: body(1<<10, ""), rounds: 10},
		{name: "highest", clients: 64, body: body(1<<10, ""), rounds: 10},
		{
			name: "streams", clients: 200, body: body(1<<10, `"stream":true,"stream_options":{},`), streams: true,
			rounds: 4,
		},
		{name: "prompts", rate: 130, clients: 32, body: body(220_000, ""), rounds: 10},
	}
}

func loadOf(name string) load {
	list := loads()
	return list[slices.IndexFunc(list, func(l load) bool { return l.name == name })]
}

// judge adds the rows of the load's targets.
func (l load) judge(t *table, plain, front figures) {
	times := func(a, b time.Duration) float64 { return float64(a) / float64(b) }
	cpu := front.cpu / front.rate * plain.rate / plain.cpu
	switch l.name {
	case "whole":
		t.most(l.name, "p99 over that of the plain proxy", 1.25, times(front.p99, plain.p99), "")
		t.most(l.name, "CPU of a request over that of the plain proxy", 1.3, cpu, "")
	case "highest":
		t.least(l.name, "rate over that of the plain proxy", 0.75, front.rate/plain.rate, "")
	case "streams":
		t.most(l.name, "p50 of a chunk beyond that of the plain proxy", 150, float64(front.p50-plain.p50)/1000, "us")
		t.most(l.name, "CPU of a chunk over that of the plain proxy", 1.2, cpu, "")
		each := func(mib float64) float64 { return (mib - front.idle) * 1024 / float64(l.clients) }
		t.most(l.name, "memory of each of the first 200 streams", 64, each(front.first), "KiB")
		t.most(l.name, "the same with what 800 streams before have left", 64, each(front.rss), "KiB")
	case "prompts":
		t.most(l.name, "p99 over that of the plain proxy", 1.5, times(front.p99, plain.p99), "")
		t.most(l.name, "CPU, of a core", 0.5, front.cpu/front.lasted.Seconds(), "")
	}
	t.most(l.name, "errors", 0, float64(front.errors), "")
}

// figures are the results of one load on one proxy.
type figures struct {
	rate     float64
	lasted   time.Duration
	p50, p99 time.Duration
	cpu      float64 // seconds of the proxy
	errors   int64
	rss      float64 // MiB, at the end of the load
	first    float64 // MiB, at the end of the first second of load
	idle     float64 // MiB, before any load
}

// summary is that of some rounds: the medians of their quantiles, which one round beside other load does not change.
func summary(rounds []figures) (all figures) {
	answers := 0.0
	var p50, p99 []time.Duration
	for _, f := range rounds {
		answers += f.rate * f.lasted.Seconds()
		all.lasted += f.lasted
		all.cpu += f.cpu
		all.errors += f.errors
		p50, p99 = append(p50, f.p50), append(p99, f.p99)
		all.rss, all.first, all.idle = f.rss, f.first, f.idle
	}
	slices.Sort(p50)
	slices.Sort(p99)
	all.p50, all.p99 = p50[len(p50)/2], p99[len(p99)/2]
	all.rate = answers / all.lasted.Seconds()
	return all
}

func (f figures) print(load, proxy string) {
	fmt.Printf("%-10s %-8s %9.0f %9s %9s %9.2f %8d %9.0f\n", load, proxy, f.rate, f.p50.Round(time.Microsecond),
		f.p99.Round(time.Microsecond), f.cpu, f.errors, f.rss)
}

func ratio(load string, plain, front figures) {
	fmt.Printf("%-10s %-8s %8.2fx %8.2fx %8.2fx %8.2fx\n\n", load, "ratio", front.rate/plain.rate,
		float64(front.p50)/float64(plain.p50), float64(front.p99)/float64(plain.p99),
		front.cpu/front.rate*plain.rate/plain.cpu)
}

func newClient() *http.Client {
	return &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1024, DisableCompression: true}}
}

// warm opens connections and fills pools. The idle process is that which has served one request before: the code of the
// program is in memory.
func (p *process) warm(ctx context.Context, l load) {
	client := newClient()
	defer client.CloseIdleConnections()
	_, _ = p.once(ctx, client, l, time.Now()) // an error comes again under load
	p.idle = p.rss()
	p.drive(ctx, client, l, time.Second)
	p.first = p.rss()
}

// measure is one round.
func (p *process) measure(ctx context.Context, l load, lasts time.Duration) figures {
	client := newClient()
	defer client.CloseIdleConnections()
	before := p.cpu()
	f := p.drive(ctx, client, l, lasts)
	f.cpu = p.cpu() - before
	f.rss, f.first, f.idle = p.rss(), p.first, p.idle
	return f
}

// drive sends the load and takes the time of each answer, or of each chunk of a stream.
func (p *process) drive(ctx context.Context, client *http.Client, l load, lasts time.Duration) figures {
	ctx, cancel := context.WithTimeout(ctx, lasts)
	defer cancel()
	var all []time.Duration
	var mu sync.Mutex
	var failed atomic.Int64
	var group sync.WaitGroup
	turns := pace(ctx, l.rate)
	start := time.Now()
	for range l.clients {
		group.Go(func() {
			var mine []time.Duration
			for due := range turns {
				if due.IsZero() {
					due = time.Now()
				}
				took, err := p.once(ctx, client, l, due)
				mine = append(mine, took...) // of a stream that the end of the measurement cut, the chunks until then
				if ctx.Err() != nil {
					break
				}
				if err != nil {
					failed.Add(1)
				}
			}
			mu.Lock()
			all = append(all, mine...)
			mu.Unlock()
		})
	}
	group.Wait()
	f := figures{errors: failed.Load(), lasted: time.Since(start)}
	f.rate = float64(len(all)) / f.lasted.Seconds()
	slices.Sort(all)
	if len(all) > 0 {
		f.p50, f.p99 = all[len(all)/2], all[len(all)*99/100]
	}
	return f
}

// pace gives turns at a rate, each with the time at which it was due, so that a slow answer does not hide
// the wait of those behind it.
func pace(ctx context.Context, rate int) <-chan time.Time {
	turns := make(chan time.Time)
	go func() {
		defer close(turns)
		start := time.Now()
		for n := 0; ; n++ {
			var due time.Time
			if rate > 0 {
				due = start.Add(time.Duration(n) * time.Second / time.Duration(rate))
				time.Sleep(time.Until(due))
			}
			select {
			case turns <- due:
			case <-ctx.Done():
				return
			}
		}
	}()
	return turns
}

func (p *process) once(ctx context.Context, client *http.Client, l load, due time.Time) ([]time.Duration, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url+"/v1/chat/completions",
		bytes.NewReader(l.body))
	if err != nil {
		return nil, err
	}
	answer, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("status %d", answer.StatusCode)
	}
	if l.streams {
		return chunks(answer.Body)
	}
	if _, err := io.Copy(io.Discard, answer.Body); err != nil {
		return nil, err
	}
	return []time.Duration{time.Since(due)}, nil
}

// chunks returns how long each chunk was on its way: the worker writes down when it sent it.
func chunks(body io.Reader) (took []time.Duration, err error) {
	lines := bufio.NewReader(body)
	for {
		line, err := lines.ReadString('\n')
		if stamp, is := strings.CutPrefix(line, ": "); is {
			if sent, bad := strconv.ParseInt(strings.TrimSpace(stamp), 10, 64); bad == nil {
				took = append(took, time.Since(time.Unix(0, sent)))
			}
		}
		if err != nil {
			return took, nil //nolint:nilerr // the end of the stream, or of the measurement
		}
	}
}

// cpu is the time that the process has used, in seconds.
func (p *process) cpu() float64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(rest)
	user, _ := strconv.ParseFloat(fields[11], 64)
	system, _ := strconv.ParseFloat(fields[12], 64)
	return (user + system) / 100 // USER_HZ
}

// rss is the memory of the process in MiB.
func (p *process) rss() float64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(text), "VmRSS:")
	kib, _ := strconv.ParseFloat(strings.Fields(rest)[0], 64)
	return kib / 1024
}
