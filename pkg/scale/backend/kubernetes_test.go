package backend

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/scale"
)

// apiServer is an API server with one Deployment. Each address may be told to misbehave for a number of requests.
type apiServer struct {
	mu       sync.Mutex
	replicas int
	version  int
	pods     []pod
	cheap    map[string]bool
	deleted  []string
	unmade   int            // replicas of which no pod can be made
	rivals   string         // of the target: the resource that owns it
	faults   map[string]int // "METHOD last element" to a status, or 0 for an answer that ends in the middle
	times    int            // each of them
	message  string         // of the faults
	patches  int
	page     int // pods a page; 0: all
	calls    []string
}

func (a *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	elements := strings.Split(r.URL.Path, "/")
	what := r.Method + " " + elements[len(elements)-1]
	a.calls = append(a.calls, what)
	if status, faulty := a.faults[what]; faulty && a.times > 0 && (status != http.StatusGone || r.URL.Query().Has("continue")) {
		a.times--
		if status == 0 {
			w.Header().Set("Content-Length", "1000")
			fmt.Fprint(w, `{"kind": "PodList", "items": [`)
			return
		}
		w.WriteHeader(status)
		reason := map[int]string{http.StatusGone: "Expired", http.StatusConflict: "Conflict"}[status]
		// A continuation in the answer goes on with the pods of now: the pages before are of another time.
		fmt.Fprintf(w, `{"kind": "Status", "status": "Failure", "message": %q, "reason": %q, "code": %d, "metadata": {"continue": "1"}}`,
			cmp.Or(a.message, "told to"), reason, status)
		return
	}
	switch {
	case r.Header.Get("Authorization") != "Bearer secret":
		w.WriteHeader(http.StatusUnauthorized)
	case what == "GET scale":
		fmt.Fprintf(w, `{"metadata": {"resourceVersion": "%d"}, "spec": {"replicas": %d}, "status": {"replicas": %d, "selector": "app=llama"}}`,
			a.version, a.replicas, max(0, a.replicas-a.unmade))
	case what == "PATCH scale":
		a.patch(w, r)
	case what == "GET pods":
		a.list(w, r)
	case r.Method == http.MethodDelete:
		a.delete(w, r, elements[len(elements)-1])
	case r.Method == http.MethodPatch:
		name := elements[len(elements)-1]
		if !strings.Contains(name, "pod") {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		a.cheap[name] = true
		fmt.Fprint(w, `{}`)
	case elements[len(elements)-1] == a.rivals:
		fmt.Fprint(w, `{"items": [{"metadata": {"name": "other"}, "spec": {"scaleTargetRef": {"kind": "Deployment", "name": "llama"}}}]}`)
	case what == "GET horizontalpodautoscalers":
		fmt.Fprint(w, `{"items": [{"metadata": {"name": "x"}, "spec": {"scaleTargetRef": {"kind": "StatefulSet", "name": "llama"}}}]}`)
	default:
		w.WriteHeader(http.StatusNotFound)
	}
}

func (a *apiServer) patch(w http.ResponseWriter, r *http.Request) {
	var s scaleObject
	if err := json.NewDecoder(r.Body).Decode(&s); err != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	if s.Metadata.ResourceVersion != fmt.Sprint(a.version) {
		w.WriteHeader(http.StatusConflict)
		return
	}
	a.replicas, a.version, a.patches = s.Spec.Replicas, a.version+1, a.patches+1
	fmt.Fprint(w, `{}`)
}

// delete has a pod end. Its controller starts another one.
func (a *apiServer) delete(w http.ResponseWriter, r *http.Request, name string) {
	var options struct {
		Preconditions struct {
			UID string `json:"uid"`
		} `json:"preconditions"`
	}
	if err := json.NewDecoder(r.Body).Decode(&options); err != nil || r.Header.Get("Content-Type") != "application/json" {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	for i := range a.pods {
		p := &a.pods[i]
		if p.Metadata.Name != name {
			continue
		}
		if p.Metadata.UID != options.Preconditions.UID {
			w.WriteHeader(http.StatusConflict)
			return
		}
		now := time.Now()
		p.Metadata.Deleted = &now
		a.deleted = append(a.deleted, name)
		fmt.Fprint(w, `{}`)
		return
	}
	w.WriteHeader(http.StatusNotFound)
}

func (a *apiServer) list(w http.ResponseWriter, r *http.Request) {
	if r.URL.Query().Get("labelSelector") != "app=llama" {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	if r.URL.Query().Has("watch") {
		return // it ends at once
	}
	first := 0
	_, _ = fmt.Sscan(r.URL.Query().Get("continue"), &first)
	last, next := len(a.pods), ""
	if a.page > 0 && first+a.page < last {
		last = first + a.page
		next = fmt.Sprint(last)
	}
	body := map[string]any{
		"kind": "PodList", "metadata": map[string]string{"continue": next, "resourceVersion": "7"}, "items": a.pods[first:last],
	}
	if err := json.NewEncoder(w).Encode(body); err != nil {
		panic(err)
	}
}

func newCluster(t *testing.T, replicas int) (*apiServer, *Kubernetes, scale.Order) {
	t.Helper()
	a := &apiServer{replicas: replicas, version: 5, cheap: map[string]bool{}, faults: map[string]int{}, times: 1}
	for i := range replicas {
		var p pod
		text := fmt.Sprintf(`{"metadata": {"name": "pod-%d", "uid": "id-%d", "creationTimestamp": "2026-01-01T12:00:00Z"},
			"status": {"phase": "Running", "podIP": "10.0.0.%d", "conditions": [{"type": "Ready", "status": "True"}]}}`, i, i, i+1)
		if err := json.Unmarshal([]byte(text), &p); err != nil {
			t.Fatal(err)
		}
		a.pods = append(a.pods, p)
	}
	server := httptest.NewServer(a)
	t.Cleanup(server.Close)
	k := NewKubernetes(KubernetesConfig{
		Server: server.URL, Namespace: "models", Token: func() (string, error) { return "secret", nil },
	})
	return a, k, scale.Order{
		BackendTarget: scale.BackendTarget{Name: "own", Model: "llama", Target: []byte(`{"name": "llama", "port": 8000, "path": "/v1"}`)},
		Count:         replicas,
	}
}

func TestPodsAreInstances(t *testing.T) {
	a, k, o := newCluster(t, 4)
	now := time.Now()
	a.pods[1].Metadata.Deleted = &now
	a.pods[2].Status.Conditions = nil
	a.pods[2].Status.Phase = "Pending"
	a.page = 3
	found, err := k.List(t.Context(), o.BackendTarget)
	if err != nil || len(found) != 4 {
		t.Fatalf("%v %v", found, err)
	}
	if found[0].Endpoint != "http://10.0.0.1:8000/v1" || found[0].State != scale.InstanceRunning ||
		found[1].State != scale.InstanceEnding || found[2].Endpoint != "" || found[2].State != scale.InstanceRunning {
		t.Errorf("%+v", found)
	}
}

func TestAListThatFailsIsNotEmpty(t *testing.T) {
	for what, status := range map[string]int{"GET pods": 0, "GET scale": 503} {
		a, k, o := newCluster(t, 2)
		a.faults[what] = status
		if found, err := k.List(t.Context(), o.BackendTarget); err == nil {
			t.Errorf("%s answers %d: %v and no error", what, status, found)
		}
	}
	for _, status := range []int{429, 403, 500} {
		a, k, o := newCluster(t, 2)
		a.faults["GET pods"] = status
		if found, err := k.List(t.Context(), o.BackendTarget); err == nil {
			t.Errorf("pods answer %d: %v and no error", status, found)
		}
	}
	a, k, o := newCluster(t, 5)
	a.page = 2
	a.faults["GET pods"] = http.StatusGone // the continuation is forgotten once
	if found, err := k.List(t.Context(), o.BackendTarget); err != nil || len(found) != 5 {
		t.Errorf("after 410: %d pods, %v", len(found), err)
	}
	a.times = 100
	if found, err := k.List(t.Context(), o.BackendTarget); err == nil {
		t.Errorf("410 for ever: %v and no error", found)
	}
}

func TestTheScaleIsSetOnce(t *testing.T) {
	a, k, o := newCluster(t, 2)
	o.Count = 3
	for range 2 {
		if err := k.Apply(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	if a.replicas != 3 || a.patches != 1 {
		t.Errorf("%d replicas after %d changes", a.replicas, a.patches)
	}
	a.faults["PATCH scale"] = http.StatusConflict
	o.Count = 4
	if err := k.Apply(t.Context(), o); err != nil || a.replicas != 4 {
		t.Errorf("after 409: %v, %d replicas", err, a.replicas)
	}
	a.times = 100
	o.Count = 5
	if err := k.Apply(t.Context(), o); err == nil {
		t.Error("409 for ever: no error")
	}
	a.faults = map[string]int{"PATCH scale": 0} // it had no effect, and the answer broke off
	a.times = 1
	if err := k.Apply(t.Context(), o); err != nil && a.replicas == 5 {
		t.Error("an order that had its effect is an error: it would count as a failure for ever")
	}
	if err := k.Apply(t.Context(), o); err != nil || a.replicas != 5 {
		t.Errorf("given again: %v, %d replicas", err, a.replicas)
	}
}

func TestOnlyMarkedPodsMayGo(t *testing.T) {
	a, k, o := newCluster(t, 4)
	o.Count, o.Remove = 1, []string{"pod-2"} // more than it names are too many: those drain
	if err := k.Apply(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	if a.replicas != 3 || !a.cheap["pod-2"] || len(a.cheap) != 1 {
		t.Errorf("%d replicas, marked: %v", a.replicas, a.cheap)
	}
	o.Count, o.Remove = 2, []string{"gone-1"}
	if err := k.Apply(t.Context(), o); err != nil || a.replicas != 3 {
		t.Errorf("a pod that is gone already: %v, %d replicas", err, a.replicas)
	}
	a.faults["PATCH pod-0"] = 500
	o.Remove = []string{"pod-0"}
	if err := k.Apply(t.Context(), o); err == nil || a.replicas != 3 {
		t.Errorf("a pod that cannot be marked: %v, %d replicas", err, a.replicas)
	}
}

// However many pods are to go, an order ends within its time: the next one has the rest.
func TestManyPodsGoInSeveralOrders(t *testing.T) {
	a, k, o := newCluster(t, 2*removeMax+20)
	o.Count = 0
	for _, left := range []int{removeMax + 20, 20, 0} {
		o.Remove = nil
		for _, p := range a.pods {
			o.Remove = append(o.Remove, p.Metadata.Name)
		}
		if err := k.Apply(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		a.pods = slices.DeleteFunc(a.pods, func(p pod) bool { return a.cheap[p.Metadata.Name] }) // by their controller
		if a.replicas != left || len(a.pods) != left {
			t.Fatalf("%d replicas, %d pods that are not marked, want %d", a.replicas, len(a.pods), left)
		}
	}
}

// A pod that is to be replaced is deleted: the number of replicas stays, and so would the pod.
func TestAPodThatIsReplacedIsDeleted(t *testing.T) {
	a, k, o := newCluster(t, 2)
	o.Remove = []string{"pod-0"}
	for range 2 { // the order is given again
		if err := k.Apply(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	if a.replicas != 2 || a.patches != 0 || !slices.Equal(a.deleted, o.Remove) || len(a.cheap) != 0 {
		t.Errorf("%d replicas, deleted %v, marked %v", a.replicas, a.deleted, a.cheap)
	}
}

// A controller chooses pods that are not ready before those with a deletion cost. They may have requests.
func TestPodsAreDeletedByNameWhereTheirControllerWouldChooseAnother(t *testing.T) {
	for name, change := range map[string]func(*pod){
		"not ready": func(p *pod) { p.Status.Conditions = nil },
		"pending":   func(p *pod) { p.Status.Phase = "Pending" },
	} {
		a, k, o := newCluster(t, 3)
		change(&a.pods[1])
		o.Count, o.Remove = 2, []string{"pod-0"}
		for range 2 {
			if err := k.Apply(t.Context(), o); err != nil {
				t.Fatal(err)
			}
		}
		if a.replicas != 2 || !slices.Equal(a.deleted, o.Remove) {
			t.Errorf("%s: %d replicas, deleted %v", name, a.replicas, a.deleted)
		}
	}
}

// A Role of the version before has no verb delete of pods: the pods are marked, and the number is lowered, for a moment where it
// would stay. A pod that starts and would go in the place of the marked one stays where nothing falls.
func TestWithoutTheRightToDeletePodsAreMarked(t *testing.T) {
	for name, c := range map[string]struct {
		change          func(*pod)
		replicas, count int
		want, later     int
	}{
		"it is replaced":                 {nil, 2, 2, 1, 2},
		"one fewer, another starts":      {func(p *pod) { p.Status.Conditions = nil }, 3, 2, 2, 2},
		"it is replaced, another starts": {func(p *pod) { p.Status.Conditions = nil }, 3, 3, 3, 3},
	} {
		a, k, o := newCluster(t, c.replicas)
		a.faults["DELETE pod-0"], a.times = http.StatusForbidden, 9
		a.message = `pods "pod-0" is forbidden: User "leader" cannot delete resource "pods" in API group "" in the namespace "gpu"`
		if c.change != nil {
			c.change(&a.pods[1])
		}
		o.Count, o.Remove = c.count, []string{"pod-0"}
		err := k.Apply(t.Context(), o)
		if !errors.Is(err, scale.ErrCarriedOut) || !strings.Contains(err.Error(), "lacks the verb delete of pods") {
			t.Errorf("%s: %v", name, err)
		}
		if a.replicas != c.want || !a.cheap["pod-0"] || len(a.cheap) != 1 || len(a.deleted) > 0 {
			t.Errorf("%s: %d replicas, marked %v, deleted %v", name, a.replicas, a.cheap, a.deleted)
		}
		o.Remove = nil
		if err := k.Apply(t.Context(), o); err != nil || a.replicas != c.later {
			t.Errorf("%s: the next order: %v, %d replicas", name, err, a.replicas)
		}
	}
	a, k, o := newCluster(t, 2)
	a.faults["DELETE pod-0"], a.faults["PATCH pod-0"], a.times = http.StatusForbidden, http.StatusForbidden, 9
	o.Remove = []string{"pod-0"}
	if err := k.Apply(t.Context(), o); err == nil || errors.Is(err, scale.ErrCarriedOut) || a.replicas != 2 {
		t.Errorf("without the right to mark: %v, %d replicas", err, a.replicas)
	}
}

// A webhook of the cluster refuses with the same status as RBAC: no verb is missing.
func TestAPodThatAdmissionProtectsIsMarked(t *testing.T) {
	a, k, o := newCluster(t, 2)
	a.faults["DELETE pod-0"], a.times = http.StatusForbidden, 9
	a.message = `admission webhook "keep.example" denied the request: deleting pods is for people`
	o.Remove = []string{"pod-0"}
	err := k.Apply(t.Context(), o)
	if !errors.Is(err, scale.ErrCarriedOut) || !strings.Contains(err.Error(), "deleting pods is for people") {
		t.Errorf("the error is %v", err)
	}
	if err != nil && strings.Contains(err.Error(), "verb") {
		t.Errorf("a verb is said to be missing: %v", err)
	}
}

// One that ends already is not among the pods by which the number may fall.
func TestAPodThatEndsLowersTheNumberNoMore(t *testing.T) {
	a, k, o := newCluster(t, 3)
	now := time.Now()
	a.pods[0].Metadata.Deleted = &now
	o.Count, o.Remove = 2, []string{"pod-0"}
	if err := k.Apply(t.Context(), o); err != nil || a.replicas != 3 || len(a.deleted)+len(a.cheap) > 0 {
		t.Errorf("%v, %d replicas, deleted %v, marked %v", err, a.replicas, a.deleted, a.cheap)
	}
}

// A pod that was deleted, or whose name another one has, between the list and the order: its controller has made up for
// it, and a lower number would end another pod.
func TestAPodThatIsGoneSinceTheListLowersTheNumberNoMore(t *testing.T) {
	for name, change := range map[string]func(*apiServer){
		"marked":  func(a *apiServer) { a.faults["PATCH pod-0"] = http.StatusNotFound },
		"deleted": func(a *apiServer) { a.faults["DELETE pod-0"] = http.StatusNotFound },
		"another": func(a *apiServer) { a.faults["DELETE pod-0"] = http.StatusConflict },
	} {
		a, k, o := newCluster(t, 3)
		change(a)
		if name != "marked" {
			a.pods[1].Status.Conditions = nil // so that it is deleted by name
		}
		o.Count, o.Remove = 2, []string{"pod-0"}
		if err := k.Apply(t.Context(), o); err != nil || a.replicas != 3 {
			t.Errorf("%s: %v, %d replicas", name, err, a.replicas)
		}
	}
}

// Replicas whose pods a quota keeps from being made do not come when there is room again and nothing wants them any more.
func TestReplicasWithoutPodsAreGivenUp(t *testing.T) {
	for name, c := range map[string]struct {
		pods, unmade, count, current int
		remove                       []string
		want                         int
		unlisted                     bool
	}{
		"none of four was made":                     {pods: 0, unmade: 4, count: 0, want: 0},
		"one of four was made, and stays":           {pods: 1, unmade: 3, count: 1, current: 1, want: 1},
		"one of four was made, and may not go yet":  {pods: 1, unmade: 3, count: 0, current: 1, want: 1},
		"one of four was made, and goes":            {pods: 1, unmade: 3, count: 0, current: 1, remove: []string{"pod-0"}, want: 0},
		"two are wanted, and one was made":          {pods: 1, unmade: 3, count: 2, current: 1, want: 2},
		"the selector finds none of four":           {pods: 0, unmade: 0, count: 0, want: 4, unlisted: true},
		"the selector finds none, others are to be": {pods: 0, unmade: 0, count: 2, want: 4},
	} {
		t.Run(name, func(t *testing.T) {
			a, k, o := newCluster(t, 4)
			a.pods, a.unmade = a.pods[:c.pods], c.unmade
			o.Count, o.Current, o.Remove = c.count, c.current, c.remove
			if err := k.Apply(t.Context(), o); errors.Is(err, errHiddenPods) != c.unlisted || err != nil && !c.unlisted {
				t.Errorf("%v", err)
			}
			if a.replicas != c.want {
				t.Errorf("%d replicas, want %d", a.replicas, c.want)
			}
		})
	}
}

func TestAStatefulSetIsRefused(t *testing.T) {
	_, k, o := newCluster(t, 1)
	o.Target = []byte(`{"name": "llama", "port": 8000, "resource": "statefulsets", "kind": "StatefulSet"}`)
	if err := k.Apply(t.Context(), o); err == nil || !strings.Contains(err.Error(), "StatefulSet") {
		t.Errorf("%v", err)
	}
}

func TestATargetOfAnotherAutoscalerIsLeftAlone(t *testing.T) {
	for _, rival := range []string{"horizontalpodautoscalers", "scaledobjects"} {
		a, k, o := newCluster(t, 2)
		a.rivals = rival
		o.Count = 7
		if err := k.Apply(t.Context(), o); !errors.Is(err, scale.ErrNotOwned) || a.replicas != 2 {
			t.Errorf("%s: %v, %d replicas", rival, err, a.replicas)
		}
	}
	a, k, o := newCluster(t, 2)
	a.faults["GET horizontalpodautoscalers"] = http.StatusForbidden
	o.Count = 7
	if err := k.Apply(t.Context(), o); err == nil || a.replicas != 2 {
		t.Errorf("owners cannot be read: %v, %d replicas", err, a.replicas)
	}
}

// The manifest grants what the backend uses, no less and no more. TestOnARealAPIServer has a server that enforces it.
func TestTheRoleGrantsTheRightsThatAreUsed(t *testing.T) {
	_, k, o := newCluster(t, 3)
	w := &witness{next: http.DefaultTransport, used: map[string]bool{}}
	k.cfg.Client, k.stream = &http.Client{Transport: w}, &http.Client{Transport: w}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go k.Watch(ctx, func(string) {})
	for !w.has("watch /pods") {
		if _, err := k.List(t.Context(), o.BackendTarget); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond)
	}
	o.Remove = []string{"pod-0"} // it is replaced
	if err := k.Apply(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	o.Count, o.Remove = 2, []string{"pod-1"}
	if err := k.Apply(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	w.compare(t, granted(t))
}
