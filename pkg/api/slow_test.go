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

	"github.com/penstock/penstock/pkg/invalidation"
)

// readAndDiscard is the address of a server that reads, and answers nothing.
func readAndDiscard(t *testing.T) string {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(io.Discard, conn)
				conn.Close()
			}()
		}
	}()
	return listener.Addr().String()
}

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
// clients that push: the p99 of the pushes before and meanwhile, measured in one run.
func TestSlowConnectionsDoNotDoubleTheP99OfOthers(t *testing.T) {
	const slow = 2000
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err != nil || files.Cur < 2*slow+500 {
		t.Fatalf("the test needs %d open files, may have %d: ulimit -n (%v)", 2*slow+500, files.Cur, err)
	}
	s := serve(t, Config{}, invalidation.Config{})
	s.Close()
	listener, err := Listen(t.Context(), ListenConfig{Address: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Serve(ctx, listener, s.api, slog.New(slog.DiscardHandler)) }()
	address := listener.Addr().String()

	p99 := func() time.Duration {
		client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 4}}
		defer client.CloseIdleConnections()
		var mu sync.Mutex
		var all []time.Duration
		var pushers sync.WaitGroup
		for range 4 {
			pushers.Go(func() {
				for range 400 {
					start := time.Now()
					r, _ := http.NewRequestWithContext(ctx, "POST", "http://"+address+pushTo, strings.NewReader(`{"payload": 1}`))
					r.Header.Set("Content-Type", "application/json")
					answer, err := client.Do(r)
					if err != nil || answer.StatusCode != http.StatusCreated {
						t.Errorf("push: %v %v", answer, err)
						return
					}
					_, _ = io.Copy(io.Discard, answer.Body)
					answer.Body.Close()
					mu.Lock()
					all = append(all, time.Since(start))
					mu.Unlock()
				}
			})
		}
		pushers.Wait()
		slices.Sort(all)
		return all[len(all)*99/100]
	}
	p99() // warms up
	// The slow clients are in this process, and take of its time beside either server.
	leave := slowClients(t, readAndDiscard(t), slow)
	before := min(p99(), p99())
	leave()
	leave = slowClients(t, address, slow)
	with := min(p99(), p99())
	leave()
	stop()
	if err := <-ended; err != nil {
		t.Errorf("server ended: %v", err)
	}
	t.Logf("p99 of pushes: %s beside %d slow connections to another server, %s with them", before, slow, with)
	if with > max(2*before, 10*time.Millisecond) { // below that, the machine's other work decides
		t.Errorf("p99 went from %s to %s", before, with)
	}
}
