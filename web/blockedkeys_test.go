package web

import (
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// A key that a failure blocks is on the page of locks with its failure, explains the wait of the next entry, and is
// unblocked from there.
func TestABlockedKeyIsListedExplainedAndUnblocked(t *testing.T) {
	s := newSite(t)
	ctx := t.Context()
	q, err := invalidation.Create(ctx, s.pool, "strict", invalidation.Config{OnFailure: invalidation.OnFailureBlockKey})
	if err != nil {
		t.Fatal(err)
	}
	const node = invalidation.NodeID(8001)
	if err := invalidation.Register(ctx, s.pool, invalidation.Node{ID: node, Name: "n", Application: "default", Lease: time.Hour}); err != nil {
		t.Fatal(err)
	}
	ids, err := q.Push(ctx,
		invalidation.Push{Payload: []byte(`1`), LockKey: "<b>user 7"},
		invalidation.Push{Payload: []byte(`2`), LockKey: "<b>user 7"})
	if err != nil {
		t.Fatal(err)
	}
	claimed, err := q.Claim(ctx, invalidation.ClaimRequest{Node: node, ClaimID: 1, Lane: invalidation.Lane{Priority: 1}, Limit: 1})
	if err != nil || len(claimed.Locks) != 1 {
		t.Fatalf("claimed %+v, %v", claimed, err)
	}
	failed := invalidation.Fail(claimed.Locks[0], ids[0].ID, invalidation.Failure{Class: "input", Error: "no such <i>address"}, 0)
	failed.Last = true
	if _, err := q.Settle(ctx, node, []invalidation.Ending{failed}); err != nil {
		t.Fatal(err)
	}

	b := s.as(operatorRole)
	for path, wanted := range map[string][]string{
		"locks":                            {"Blocked lock keys", "&lt;b&gt;user 7", "no such &lt;i&gt;address", "Unblock…"},
		"locks?queue=strict":               {"Blocked lock keys"},
		"entries/" + fmt.Sprint(ids[1].ID): {"is blocked since entry", "locks?queue=strict"},
		"do/unblock_key?queue=strict&lock_key=" + url.QueryEscape("<b>user 7"): {"Run the failed entry again first"},
	} {
		got := b.get(path)
		for _, text := range wanted {
			if got.status != http.StatusOK || !strings.Contains(got.text, text) {
				t.Errorf("%s: %d has no %q", path, got.status, text)
			}
		}
	}

	form := url.Values{"reason": {"address is mended"}, "queue": {"strict"}, "lock_key": {"<b>user 7"}, "next": {"locks"}}
	if got := s.as(viewer).post("do/unblock_key", form); got.status != http.StatusForbidden {
		t.Errorf("a viewer gets %d", got.status)
	}
	form.Set("retry", "yes")
	if got := b.post("do/unblock_key", form); got.status != http.StatusOK || strings.Contains(got.text, "Blocked lock keys") {
		t.Errorf("unblocked: %d, and the key is still listed: %t", got.status, strings.Contains(got.text, "Blocked lock keys"))
	}
	e, err := s.change.Explain(ctx, int64(ids[0].ID))
	if err != nil || e.State == "failed" {
		t.Errorf("the failed entry is %+v, %v; want it in the queue again", e, err)
	}
	last, err := s.change.Audits(ctx, operator.AuditFilter{Limit: 1})
	if err != nil || len(last) != 1 || last[0].Reason != "address is mended" {
		t.Errorf("the audit has %+v, %v", last, err)
	}
}
