package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/penstock/penstock/bench/meter"
	"github.com/penstock/penstock/pkg/invalidation"
)

// prompt is what all calls ask.
const prompt = "What does a penstock do, and why?"

func body(tokens int, user string) string {
	return fmt.Sprintf(`{"model":%q,"stream":true,"user":%q,"max_tokens":%d,"messages":[{"role":"user","content":%q}]}`,
		modelName, user, tokens, prompt)
}

// around returns a count of tokens from half of mean to half as much again.
func around(mean int) int { return mean/2 + rand.IntN(mean+1) }

// stream is one call by a client that reads the answer as it comes.
type stream struct {
	first, whole time.Duration // until the first token and the last one, from the sending of the request
}

// ask makes a call. Where piece is not nil it is told of each piece of the answer.
func (p *testbed) ask(ctx context.Context, client *http.Client, url, body string, piece func()) (s stream, err error) {
	if url == p.worker.url {
		body = strings.Replace(body, `"model":"`+modelName+`",`, "", 1)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions",
		strings.NewReader(body))
	if err != nil {
		return s, err
	}
	request.Header.Set("Content-Type", "application/json")
	sent := time.Now()
	answer, err := client.Do(request)
	if err != nil {
		return s, err
	}
	defer answer.Body.Close()
	lines := bufio.NewScanner(answer.Body)
	for lines.Scan() {
		line := lines.Text()
		if answer.StatusCode != http.StatusOK {
			return s, fmt.Errorf("status %d: %s", answer.StatusCode, line)
		}
		if !strings.HasPrefix(line, "data: ") {
			continue
		}
		if s.first == 0 {
			s.first = time.Since(sent)
		}
		if piece != nil {
			piece()
		}
		s.whole = time.Since(sent)
		if line == "data: [DONE]" {
			return s, nil
		}
	}
	return s, fmt.Errorf("the stream has no end: %w", lines.Err())
}

// callers is clients that each make one call after another.
type callers struct {
	mu      sync.Mutex
	streams []stream
	failed  int
	lastErr error
	group   sync.WaitGroup
	stop    context.CancelFunc
}

// clients sends n calls at a time to url.
func (p *testbed) clients(url string, n, mean int) *callers {
	ctx, stop := context.WithCancel(p.ctx)
	c := &callers{stop: stop}
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 2 * n}}
	for range n {
		c.group.Go(func() {
			for ctx.Err() == nil {
				s, err := p.ask(ctx, client, url, body(around(mean), ""), nil)
				if ctx.Err() == nil {
					c.add(s, err)
				}
			}
		})
	}
	return c
}

func (c *callers) add(s stream, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		c.failed++
		c.lastErr = err
		return
	}
	c.streams = append(c.streams, s)
}

// reset forgets what was measured so far.
func (c *callers) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.streams, c.failed = nil, 0
}

// firsts returns the sorted times until the first token.
func (c *callers) firsts() (list []time.Duration, failed int, lastErr error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.streams {
		list = append(list, s.first)
	}
	slices.Sort(list)
	return list, c.failed, c.lastErr
}

func (c *callers) end() {
	c.stop()
	c.group.Wait()
}

// push pushes n entries of a flow.
func (p *testbed) push(n int, tokens func() int, flow string) ([]invalidation.Pushed, error) {
	pushes := make([]invalidation.Push, n)
	for i := range pushes {
		pushes[i] = invalidation.Push{Payload: json.RawMessage(body(tokens(), flow)), Flow: flow}
	}
	return p.queue.Push(p.ctx, pushes...)
}

// keep has n entries of a flow in the queue, waiting or running, until the returned function is called.
func (p *testbed) keep(n int, tokens func() int, flow string) (stop func() error) {
	ctx, cancel := context.WithCancel(p.ctx)
	done := make(chan error, 1)
	go func() {
		for ctx.Err() == nil {
			var there int
			err := p.pool.QueryRow(ctx, `SELECT count(*) FROM penstock.entry WHERE flow = $1`, flow).Scan(&there)
			if err == nil && there < n {
				_, err = p.push(n-there, tokens, flow)
			}
			if err != nil && ctx.Err() == nil {
				done <- err
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
		done <- nil
	}()
	return func() error { cancel(); return <-done }
}

// quantile of durations, in milliseconds; 0 without any.
func quantile(list []time.Duration, q float64) float64 {
	return float64(meter.Quantile(list, q)) / float64(time.Millisecond)
}
