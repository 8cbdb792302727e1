package tasknode_test

import (
	"bytes"
	"context"
	"log/slog"
	"regexp"
	"strings"
	"testing"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
)

// A program that runs its node while it holds a leadership would otherwise have one that looks live and claims nothing.
func TestANodeThatHasRunIsNotRunAgain(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	if _, err := invalidation.Create(t.Context(), pool, "bills", invalidation.Config{Application: "billing"}); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	n := tasknode.New(tasknode.Config{Name: "twice", Threads: 1, Log: slog.New(slog.NewTextHandler(&log, nil))}, pool, pool)
	for _, queue := range []string{"work", "bills", "missing"} {
		n.Handle(queue, invalidation.HandlerFunc(fine))
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	push(t, q, payload(invalidation.Push{}))
	eventually(t, pool, "the entry has run", emptySQL)
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	for queue, why := range map[string]string{"bills": "another application", "missing": "does not exist"} {
		line := regexp.MustCompile("(?m)^.*" + why + ".* queue=" + queue + "\\b")
		if !line.MatchString(log.String()) || strings.Count(log.String(), "queue="+queue) != 1 {
			t.Errorf("not one warning about the handler of queue %q, which is not served:\n%s", queue, log.String())
		}
	}
	if strings.Contains(log.String(), "queue=work") {
		t.Errorf("a warning about a queue that is served:\n%s", log.String())
	}
	ctx, cancel = context.WithCancel(t.Context())
	cancel() // or the test waits for ever where the node runs
	if err := n.Run(ctx); err == nil || !strings.Contains(err.Error(), "has run") {
		t.Errorf("the second Run returned %v, want an error that says so", err)
	}
}
