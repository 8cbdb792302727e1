package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/client"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// keyedPushes is an API that accepts each key once. From request mute on it accepts and does not answer.
type keyedPushes struct {
	ids      map[string]invalidation.EntryID
	requests int
	mute     int
}

func (k *keyedPushes) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var entries []newEntry
	if err := json.NewDecoder(r.Body).Decode(&entries); err != nil {
		panic(err)
	}
	var answers []invalidation.Pushed
	for _, e := range entries {
		p := invalidation.Pushed{ID: k.ids[e.IdempotencyKey], Verdict: invalidation.Replayed}
		if p.ID == 0 {
			p = invalidation.Pushed{ID: invalidation.EntryID(len(k.ids) + 1), Verdict: invalidation.Inserted}
			k.ids[e.IdempotencyKey] = p.ID
		}
		answers = append(answers, p)
	}
	if k.requests++; k.mute > 0 && k.requests >= k.mute {
		panic(http.ErrAbortHandler)
	}
	writeAnswer(w, http.StatusCreated, map[string]any{"entries": answers})
}

func TestAPushOfLinesWithoutAnAnswerCanBeRepeated(t *testing.T) {
	lines := filepath.Join(t.TempDir(), "lines")
	if err := os.WriteFile(lines, []byte(strings.Repeat("{}\n", 2500)), 0o600); err != nil {
		t.Fatal(err)
	}
	s := &keyedPushes{ids: map[string]invalidation.EntryID{}, mute: 2}
	_, errs, code := command(t, s, "entry", "push", "mails", "--lines", lines)
	if code == exitDone || !strings.Contains(errs, "whether lines 1001 to 2000 were accepted is unknown, the 1000 entries before them were") {
		t.Fatalf("exit %d: %s", code, errs)
	}
	key := regexp.MustCompile(`--idempotency-key (\S+)`).FindStringSubmatch(errs)
	if key == nil {
		t.Fatalf("no key is printed: %s", errs)
	}
	s.mute = 0
	out, errs, code := command(t, s, "entry", "push", "mails", "--lines", lines, "--idempotency-key", key[1])
	if code != exitDone || out != "2500 entries, ids 1 to 2500, 2000 of them accepted before\n" || len(s.ids) != 2500 {
		t.Errorf("exit %d, %d entries: %s%s", code, len(s.ids), out, errs)
	}
}

// full is a file on a disk without space.
type full struct{}

func (full) Write([]byte) (int, error) { return 0, syscall.ENOSPC }

// What a command prints may be a secret that is shown once.
func TestACommandWhoseOutputCannotBeWrittenFails(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/tokens", func(w http.ResponseWriter, _ *http.Request) {
		writeAnswer(w, http.StatusCreated, map[string]any{"name": "ci", "secret": "pst_x"})
	})
	mux.Handle("/", &fake{})
	for _, line := range []string{
		"token create ci --scope push --reason test", "token create ci --scope push --reason test -o json",
		"queue pause mails --reason test", "queue pause mails --dry-run", "queue list",
	} {
		var errs bytes.Buffer
		a := newApp(strings.NewReader(""), full{}, &errs, func(string) string { return "" })
		a.handler = mux
		if code := run(t.Context(), a, strings.Fields(line)); code == exitDone || !strings.Contains(errs.String(), "no space left") {
			t.Errorf("%s: exit %d: %s", line, code, errs.String())
		}
	}
}

func TestAnInterruptedOperationSaysThatItGoesOn(t *testing.T) {
	ctx, interrupt := context.WithCancel(t.Context())
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/queues/mails/operations", func(w http.ResponseWriter, _ *http.Request) {
		writeAnswer(w, http.StatusOK, startedOperation{ID: 7, Matching: 3})
	})
	mux.HandleFunc("GET /v1/operations/7", func(w http.ResponseWriter, _ *http.Request) {
		writeAnswer(w, http.StatusOK, operator.Operation{Status: "running", Matched: 3, Changed: 2})
	})
	mux.HandleFunc("POST /v1/operations/7/step", func(http.ResponseWriter, *http.Request) { interrupt() })
	var out, errs bytes.Buffer
	a := newApp(strings.NewReader(""), &out, &errs, func(string) string { return "" })
	a.handler = mux
	code := run(ctx, a, strings.Fields("failure retry --queue mails --all --yes --reason test"))
	for _, says := range []string{"operation 7\n", "penstock: 2 changed so far; operation 7 goes on", "penstock operation cancel 7", "penstock: interrupted\n"} {
		if code != exitInterrupted || !strings.Contains(errs.String(), says) {
			t.Errorf("exit %d, want %q:\n%s", code, says, errs.String())
		}
	}
}

// A change that was interrupted after it was sent may be in force, as one that timed out.
func TestAnInterruptedChangeSaysThatItMayHaveBeenMade(t *testing.T) {
	for line, says := range map[string]string{
		"queue pause mails --reason test": "penstock: interrupted\nnext: whether it was done is not known: penstock queue show prints its state; look before you repeat it\n",
		"queue show mails":                "penstock: interrupted\n",
	} {
		ctx, interrupt := context.WithCancel(t.Context())
		mux := http.NewServeMux()
		mux.HandleFunc("/v1/queues/mails/pause", func(_ http.ResponseWriter, r *http.Request) {
			interrupt()
			<-r.Context().Done()
		})
		mux.HandleFunc("/v1/queues/mails", func(w http.ResponseWriter, r *http.Request) {
			if strings.Contains(line, "show") {
				interrupt()
				<-r.Context().Done()
			}
			writeAnswer(w, http.StatusOK, queuesNow()[1])
		})
		var out, errs bytes.Buffer
		a := newApp(strings.NewReader(""), &out, &errs, func(string) string { return "" })
		a.handler = mux
		if code := run(ctx, a, strings.Fields(line)); code != exitInterrupted || errs.String() != says {
			t.Errorf("%s: exit %d, %q, want %q", line, code, errs.String(), says)
		}
	}
}

func TestAPushThatWaitsNamesItsEntryAndReadsItByItsKey(t *testing.T) {
	key := ""
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/queues/mails/entries", func(w http.ResponseWriter, r *http.Request) {
		var e newEntry
		if err := json.NewDecoder(r.Body).Decode(&e); err != nil {
			panic(err)
		}
		key = e.IdempotencyKey
		writeAnswer(w, http.StatusCreated, invalidation.Pushed{ID: 7, Verdict: invalidation.Inserted})
	})
	mux.HandleFunc("GET /v1/entries/7", func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Idempotency-Key") != fmt.Sprintf("%q", key) || r.URL.Query().Get("flow") != "acme" {
			writeAnswer(w, http.StatusForbidden, client.Error{Code: client.Forbidden, Detail: "it needs scope read"})
			return
		}
		writeAnswer(w, http.StatusOK, map[string]any{"id": 7, "state": "done", "ended_at": time.Now()})
	})
	out, errs, code := command(t, mux, "entry", "push", "mails", "{}", "--flow", "acme", "--wait")
	if code != exitDone || !strings.Contains(out, "done") || !strings.Contains(errs, "entry 7 inserted\n") {
		t.Errorf("exit %d: %s%s", code, out, errs)
	}
}

// Scripts compute delays, and one of 0 s is none.
func TestAnEntryThatIsDueAfterNoTimeIsDueAtOnce(t *testing.T) {
	for _, due := range []string{"0s", "-5m"} {
		pushed := ""
		push := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			pushed = string(body)
			writeAnswer(w, http.StatusCreated, invalidation.Pushed{ID: 7, Verdict: invalidation.Inserted})
		})
		_, errs, code := command(t, push, "entry", "push", "mails", "{}", "--due", due, "--start-by", "1h")
		if code != exitDone || strings.Contains(pushed, "due_at") || !strings.Contains(pushed, `"start_by":"1h0m0s"`) {
			t.Errorf("--due %s: exit %d, pushed %s: %s", due, code, pushed, errs)
		}
	}
	for _, flag := range []string{"--start-by", "--finish-by"} {
		if _, errs, code := command(t, http.NotFoundHandler(), "entry", "push", "mails", "{}", flag, "0s"); code != exitUsage || !strings.Contains(errs, flag) {
			t.Errorf("%s 0s: exit %d: %s", flag, code, errs)
		}
	}
}

// A dry run counts among the first 100,000 entries of a queue, and so does an operation that begins.
func TestWhatAnOperationMatchesIsNoMoreThanWasCounted(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/queues/deep/operations", func(w http.ResponseWriter, _ *http.Request) {
		writeAnswer(w, http.StatusOK, startedOperation{Partial: true})
	})
	mux.HandleFunc("GET /v1/operations/7", func(w http.ResponseWriter, _ *http.Request) {
		writeAnswer(w, http.StatusOK, operator.Operation{ID: 7, Verb: "cancel", Queue: "deep", Status: "running", Matched: 2000, Changed: 2000})
	})
	for line, says := range map[string]string{
		"entry cancel --queue deep --flow acme --dry-run": "none of the first 100,000 in queue deep, and perhaps later ones",
		"operation show 7":             "2000+",
		"operation cancel 7 --dry-run": "cancel in queue deep, 2000 changed so far",
	} {
		if out, errs, code := command(t, mux, strings.Fields(line)...); code != exitDone || !strings.Contains(out+errs, says) {
			t.Errorf("%s: exit %d, want %q: %s%s", line, code, says, out, errs)
		}
	}
}
