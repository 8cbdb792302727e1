package inference_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// What a program writes to run inference. A task node takes service.Pool as one of its gates and service.Dispatcher as
// the handler of its inference queues; here the steps of its threads are written out.
func TestServiceIsAllThatANodeNeeds(t *testing.T) {
	ctx := t.Context()
	db, err := postgres.Open(ctx, postgres.Config{DSN: pgtest.DSN(t)})
	must(t, err)
	defer db.Close()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"status": "success", "result": {"faces": 2}}`)
	}))
	defer server.Close()

	// An operator registers a model and an instance; that makes the queue.
	model := worker.Model{Name: "faces", Protocol: worker.ProtocolGeneric}
	name, err := inference.RegisterModel(ctx, db, model, inference.By{Actor: "operator"})
	must(t, err)
	_, err = inference.RegisterInstance(ctx, db, "faces", "gpu-1", server.URL+"/faces", 2, nil, inference.By{Actor: "operator"})
	must(t, err)

	// A node starts.
	const node = invalidation.NodeID(7001)
	must(t, invalidation.Register(ctx, db, invalidation.Node{ID: node, Name: "node", Application: "default", Lease: time.Minute}))
	service := inference.NewService(inference.ServiceConfig{}, db, func() invalidation.NodeID { return node })
	must(t, service.Registry.Refresh(ctx))
	duties, stop := context.WithCancel(ctx)
	defer stop()
	for _, run := range service.Duties() {
		go run(duties) //nolint:errcheck // duties end with their context
	}

	// Somebody pushes, and the node runs it: permit, claim, handle, settle.
	queue, err := invalidation.Open(ctx, db, name)
	must(t, err)
	pushed, err := queue.Push(ctx, invalidation.Push{Payload: json.RawMessage(`{"image": "..."}`)})
	must(t, err)
	permits, release := service.Pool.Take(name, 1)
	for ; permits == 0; permits, release = service.Pool.Take(name, 1) { // the database may be slow to give a slot
		time.Sleep(10 * time.Millisecond)
	}
	claimed, err := queue.Claim(ctx, invalidation.ClaimRequest{
		Node: node, ClaimID: 1, Lane: invalidation.Lane{Priority: 1}, Limit: permits, IgnoreRowLocks: true,
	})
	must(t, err)
	run := &invalidation.Run{Queue: queue, Entry: claimed.Locks[0].Entries[0], Lock: claimed.Locks[0], Node: node}
	result, err := service.Dispatcher.Handle(ctx, run)
	release(permits)
	ending := invalidation.Judge(run, result, err, time.Millisecond, 0)
	ending.Last = true
	_, err = queue.Settle(ctx, node, []invalidation.Ending{ending})
	must(t, err)
	outcome, err := invalidation.Outcome(ctx, db, pushed[0].ID)
	must(t, err)
	if outcome.Outcome != "done" || string(outcome.Result) != `{"faces": 2}` {
		t.Errorf("outcome %+v", outcome)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
