package api

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/httpserver"
	"github.com/penstock/penstock/pkg/invalidation"
)

// slowClients opens so many connections, on which requests are sent a byte at a time, or none at all, until leave is called.
func slowClients(t *testing.T, address string, slow int) (leave func()) {
	t.Helper()
	var clients, opened sync.WaitGroup
	opened.Add(slow)
	slowly, stop := context.WithCancel(t.Context())
	for i := range slow {
		clients.Go(func() {
			conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
			if err != nil {
				t.Errorf("connection %d: %v", i, err)
				opened.Done()
				return
			}
			defer conn.Close()
			head := fmt.Sprintf("POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n", pushTo)
			start := []string{"", head + "\r\n{", strings.Replace(head, "json", "x-ndjson", 1) + "\r\n", "GET /v1/queues HTTP/1.1\r\nHost: localhost\r\n\r\n"}[i%4]
			_, err = io.WriteString(conn, start)
			opened.Done()
			for at := 0; err == nil; at++ {
				select {
				case <-slowly.Done():
					return
				case <-time.After(500*time.Millisecond + time.Duration(i%500)*time.Millisecond):
				}
				_, err = io.WriteString(conn, string((head + "X: " + strings.Repeat("x", 1000))[at%500]))
			}
		})
	}
	opened.Wait()
	return func() {
		stop()
		clients.Wait()
	}
}

// 2,000 clients that send their headers, their bodies or a stream byte by byte, or do not read what they are sent, beside
// clients that push to their server and to another one in this process: the p99 of the pushes to either, which alternate.
func TestTimedSlowConnectionsDoNotDoubleTheP99OfOthers(t *testing.T) {
	const slow = 2000
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err != nil || files.Cur < 2*slow+500 {
		t.Fatalf("the test needs %d open files, may have %d: ulimit -n (%v)", 2*slow+500, files.Cur, err)
	}
	servers := [2]string{listening(t), listening(t)}
	p99sOfPushes(t, servers) // warms up
	leave := slowClients(t, servers[1], slow)
	one, two := p99sOfPushes(t, servers), p99sOfPushes(t, servers)
	leave()
	without, with := min(one[0], two[0]), min(one[1], two[1])
	t.Logf("p99 of pushes: %s beside %d slow connections to another server, %s with them", without, slow, with)
	if with > max(2*without, 10*time.Millisecond) { // below that, the machine's other work decides
		t.Errorf("the p99 is %s with slow connections, %s without", with, without)
	}
}

// listening is the address of an API with a database of its own.
func listening(t *testing.T) string {
	t.Helper()
	s := serve(t, Config{}, invalidation.Config{})
	s.Close()
	listener, err := httpserver.Listen(t.Context(), httpserver.Config{Address: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- httpserver.Serve(ctx, listener, s.api, slog.New(slog.DiscardHandler)) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("server ended: %v", err)
		}
	})
	return listener.Addr().String()
}

// p99sOfPushes are those of 1,600 pushes to each of two servers, four at a time.
func p99sOfPushes(t *testing.T, servers [2]string) (p99s [2]time.Duration) {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 4}}
	defer client.CloseIdleConnections()
	var mu sync.Mutex
	var all [2][]time.Duration
	var pushers sync.WaitGroup
	for range 4 {
		pushers.Go(func() {
			for n := range 800 {
				server := n % 2
				start := time.Now()
				r, _ := http.NewRequestWithContext(t.Context(), "POST", "http://"+servers[server]+pushTo, strings.NewReader(`{"payload": 1}`))
				r.Header.Set("Content-Type", "application/json")
				answer, err := client.Do(r)
				if err != nil || answer.StatusCode != http.StatusCreated {
					t.Errorf("push: %v %v", answer, err)
					return
				}
				_, _ = io.Copy(io.Discard, answer.Body)
				answer.Body.Close()
				mu.Lock()
				all[server] = append(all[server], time.Since(start))
				mu.Unlock()
			}
		})
	}
	pushers.Wait()
	if t.Failed() {
		t.FailNow()
	}
	for server := range all {
		slices.Sort(all[server])
		p99s[server] = all[server][len(all[server])*99/100]
	}
	return p99s
}
