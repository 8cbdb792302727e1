package backend

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/penstock/penstock/pkg/scale"
)

// kubeAPIServer is the variable with the path of a kube-apiserver, which these tests start with an etcd.
const kubeAPIServer = "PENSTOCK_TEST_KUBE_APISERVER"

// cluster is a real API server on an etcd of its own. No controller and no node runs: the test makes the pods.
type cluster struct {
	url, etcd string
	client    *http.Client
}

const adminToken = "the-token-of-an-administrator"

func startCluster(t *testing.T) *cluster {
	t.Helper()
	binary := os.Getenv(kubeAPIServer)
	if binary == "" {
		t.Skipf("%s is not set: the path of a kube-apiserver; etcd has to be in PATH", kubeAPIServer)
	}
	dir := t.TempDir()
	c := &cluster{}
	ports := make([]int, 3)
	for i := range ports {
		port, err := freePort(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		ports[i] = port
	}
	c.etcd = fmt.Sprintf("http://127.0.0.1:%d", ports[0])
	peer := fmt.Sprintf("http://127.0.0.1:%d", ports[1])
	c.run(t, dir, "etcd", "--data-dir", filepath.Join(dir, "etcd"), "--unsafe-no-fsync",
		"--listen-client-urls", c.etcd, "--advertise-client-urls", c.etcd,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "default="+peer)
	key, users := filepath.Join(dir, "accounts.pem"), filepath.Join(dir, "users.csv")
	writeKey(t, key)
	if err := os.WriteFile(users, []byte(adminToken+`,admin,1,"system:masters"`+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	certs := filepath.Join(dir, "certs")
	c.url = fmt.Sprintf("https://127.0.0.1:%d", ports[2])
	c.run(t, dir, binary, "--etcd-servers", c.etcd,
		"--bind-address", "127.0.0.1", "--secure-port", fmt.Sprint(ports[2]), "--cert-dir", certs,
		"--service-account-issuer", "https://kubernetes.default.svc", "--service-account-key-file", key,
		"--service-account-signing-key-file", key, "--service-cluster-ip-range", "10.0.0.0/24",
		"--authorization-mode", "RBAC",
		"--token-auth-file", users, "--disable-admission-plugins", "ServiceAccount",
		"--feature-gates", "ListFromCacheSnapshot=false") // pages come from etcd, as from servers before 1.34
	c.await(t, certs)
	return c
}

// run starts a program until the end of the test. What it said is shown where the test fails.
func (c *cluster) run(t *testing.T, dir, program string, args ...string) {
	t.Helper()
	log, err := os.Create(filepath.Join(dir, filepath.Base(program)+".log"))
	if err != nil {
		t.Fatal(err)
	}
	command := exec.CommandContext(context.WithoutCancel(t.Context()), program, args...)
	command.Stdout, command.Stderr = log, log
	if err := command.Start(); err != nil {
		t.Fatalf("start %s: %v", program, err)
	}
	t.Cleanup(func() {
		_ = command.Process.Kill()
		_ = command.Wait()
		_ = log.Close()
		if t.Failed() {
			said, _ := os.ReadFile(log.Name())
			t.Logf("%s said: %s", program, said[max(0, len(said)-4000):])
		}
	})
}

func writeKey(t *testing.T, path string) {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	block := pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})
	if err := os.WriteFile(path, block, 0o600); err != nil {
		t.Fatal(err)
	}
}

// await waits until the server has its certificate and is ready.
func (c *cluster) await(t *testing.T, certs string) {
	t.Helper()
	var last error
	for deadline := time.Now().Add(3 * time.Minute); time.Now().Before(deadline); time.Sleep(200 * time.Millisecond) {
		cert, err := os.ReadFile(filepath.Join(certs, "apiserver.crt"))
		if err != nil {
			last = err
			continue
		}
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(cert)
		c.client = &http.Client{
			Timeout:   30 * time.Second,
			Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}},
		}
		if code, text := c.ask(t, adminToken, http.MethodGet, "/readyz", "", nil); code != http.StatusOK {
			last = fmt.Errorf("readyz answers %d: %s", code, text)
			continue
		}
		return
	}
	t.Fatalf("the API server is not ready: %v", last)
}

func (c *cluster) ask(t *testing.T, token, method, path, kind string, body any) (int, string) {
	t.Helper()
	var content io.Reader
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		content = bytes.NewReader(text)
	}
	request, err := http.NewRequestWithContext(t.Context(), method, c.url+path, content)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Authorization", "Bearer "+token)
	request.Header.Set("Content-Type", kind)
	reply, err := c.client.Do(request)
	if err != nil {
		return 0, err.Error()
	}
	defer reply.Body.Close()
	said, err := io.ReadAll(reply.Body)
	if err != nil {
		return 0, err.Error()
	}
	return reply.StatusCode, string(said)
}

// must does something as the administrator, and returns the answer.
func (c *cluster) must(t *testing.T, method, path, kind string, body any) string {
	t.Helper()
	code, text := c.ask(t, adminToken, method, path, kind, body)
	if code != http.StatusOK && code != http.StatusCreated {
		t.Fatalf("%s %s: %d %s", method, path, code, text)
	}
	return text
}

const (
	plain  = "application/json"
	merge  = "application/merge-patch+json"
	spaced = "/namespaces/models/"
	target = "/apis/apps/v1" + spaced + "deployments/llama"
)

// prepare makes a namespace with the accounts of deploy/, a Deployment, and n ready pods of it.
func (c *cluster) prepare(t *testing.T, n int) {
	t.Helper()
	c.must(t, http.MethodPost, "/api/v1/namespaces", plain, named("models"))
	c.applyAccounts(t)
	labels := map[string]any{"app": "llama"}
	template := map[string]any{
		"metadata": map[string]any{"labels": labels},
		"spec":     map[string]any{"containers": []any{map[string]any{"name": "worker", "image": "worker"}}},
	}
	c.must(t, http.MethodPost, "/apis/apps/v1"+spaced+"deployments", plain, map[string]any{
		"metadata": map[string]any{"name": "llama"},
		"spec": map[string]any{
			"replicas": n, "selector": map[string]any{"matchLabels": labels}, "template": template,
		},
	})
	for i := range n {
		name := fmt.Sprintf("llama-%d", i)
		template["metadata"] = map[string]any{"name": name, "labels": labels}
		c.must(t, http.MethodPost, "/api/v1"+spaced+"pods", plain, template)
		ip := fmt.Sprintf("10.1.0.%d", i+1)
		status := conditions("True")
		status["phase"], status["podIP"], status["podIPs"] = "Running", ip, []any{map[string]any{"ip": ip}}
		c.must(t, http.MethodPatch, podPath(name)+"/status", merge, map[string]any{"status": status})
	}
}

func named(name string) map[string]any {
	return map[string]any{"metadata": map[string]any{"name": name}}
}

func podPath(name string) string { return "/api/v1" + spaced + "pods/" + name }

// conditions is the status of a pod that is ready, or not.
func conditions(ready string) map[string]any {
	return map[string]any{"conditions": []any{map[string]any{"type": "Ready", "status": ready}}}
}

// rule is a rule of a Role.
type rule struct {
	APIGroups []string `yaml:"apiGroups"`
	Resources []string `yaml:"resources"`
	Verbs     []string `yaml:"verbs"`
}

const accounts = "../../../deploy/kubernetes/base/accounts.yaml"

// applyAccounts applies the manifest that a cluster gets, and returns the rules of its Role.
func (c *cluster) applyAccounts(t *testing.T) {
	t.Helper()
	const rbac = "/apis/rbac.authorization.k8s.io/v1"
	paths := map[string]string{
		"ServiceAccount": "/api/v1" + spaced + "serviceaccounts",
		"Role":           rbac + spaced + "roles",
		"RoleBinding":    rbac + spaced + "rolebindings",
	}
	for _, object := range manifests(t) {
		kind := fmt.Sprint(object["kind"])
		if subjects, has := object["subjects"].([]any); has { // kustomize would name the namespace
			subject, is := subjects[0].(map[string]any)
			if !is {
				t.Fatalf("the subject of %v is no object", object)
			}
			subject["namespace"] = "models"
		}
		c.must(t, http.MethodPost, paths[kind], plain, object)
	}
}

func manifests(t *testing.T) []map[string]any {
	t.Helper()
	text, err := os.ReadFile(accounts)
	if err != nil {
		t.Fatal(err)
	}
	var all []map[string]any
	for decoder := yaml.NewDecoder(bytes.NewReader(text)); ; {
		var object map[string]any
		err := decoder.Decode(&object)
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, object)
	}
}

// granted are the rights of the Role of the leader, as "verb group/resource".
func granted(t *testing.T) []string {
	t.Helper()
	var rights []string
	for _, object := range manifests(t) {
		text, err := yaml.Marshal(object["rules"])
		if err != nil || object["kind"] != "Role" {
			continue
		}
		var rules []rule
		if err := yaml.Unmarshal(text, &rules); err != nil {
			t.Fatal(err)
		}
		for _, r := range rules {
			for _, resource := range r.Resources {
				for _, verb := range r.Verbs {
					rights = append(rights, verb+" "+r.APIGroups[0]+"/"+resource)
				}
			}
		}
	}
	slices.Sort(rights)
	return rights
}

// witness records the rights that requests use, and lets a test act before one of them.
type witness struct {
	next   http.RoundTripper
	mu     sync.Mutex
	used   map[string]bool
	before func(*http.Request)
	stream io.Closer // of the last watch
}

func (w *witness) RoundTrip(r *http.Request) (*http.Response, error) {
	elements := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	group, rest := elements[1], elements[5:] // apis/GROUP/VERSION/namespaces/NAME/RESOURCE...
	if elements[0] == "api" {
		group, rest = "", elements[4:]
	}
	verb := map[string]string{http.MethodGet: "get", http.MethodPatch: "patch", http.MethodDelete: "delete"}[r.Method]
	if verb == "get" && len(rest) == 1 {
		verb = "list"
	}
	if r.URL.Query().Has("watch") {
		verb = "watch"
	}
	resource := rest[0]
	if len(rest) == 3 {
		resource += "/" + rest[2]
	}
	w.mu.Lock()
	w.used[verb+" "+group+"/"+resource] = true
	before := w.before
	w.mu.Unlock()
	if before != nil {
		before(r)
	}
	reply, err := w.next.RoundTrip(r)
	if err == nil && verb == "watch" {
		w.mu.Lock()
		w.stream = reply.Body
		w.mu.Unlock()
	}
	return reply, err
}

func (w *witness) has(right string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.used[right]
}

// compare fails the test unless the rights that were used are those, no fewer and no more.
func (w *witness) compare(t *testing.T, rights []string) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if used := slices.Sorted(maps.Keys(w.used)); !slices.Equal(used, rights) {
		t.Errorf("used: %q\ngranted: %q", used, rights)
	}
}

// leader returns the backend with the token of the account of the leader.
func (c *cluster) leader(t *testing.T) (*Kubernetes, *witness, string) {
	t.Helper()
	said := c.must(t, http.MethodPost, "/api/v1"+spaced+"serviceaccounts/penstock-leader/token", plain,
		map[string]any{"spec": map[string]any{"expirationSeconds": 3600}})
	var request struct {
		Status struct {
			Token string `json:"token"`
		} `json:"status"`
	}
	if err := json.Unmarshal([]byte(said), &request); err != nil || request.Status.Token == "" {
		t.Fatalf("no token: %v in %s", err, said)
	}
	w := &witness{next: c.client.Transport, used: map[string]bool{}}
	k := NewKubernetes(KubernetesConfig{
		Server: c.url, Namespace: "models", Client: &http.Client{Transport: w, Timeout: 30 * time.Second},
		Log:   slog.New(slog.NewTextHandler(t.Output(), nil)),
		Token: func() (string, error) { return request.Status.Token, nil },
	})
	return k, w, request.Status.Token
}

func (c *cluster) replicas(t *testing.T) int {
	t.Helper()
	var s scaleObject
	if err := json.Unmarshal([]byte(c.must(t, http.MethodGet, target+"/scale", "", nil)), &s); err != nil {
		t.Fatal(err)
	}
	return s.Spec.Replicas
}

// The parts build on each other: they share one API server, whose start takes most of the time.
func TestOnARealAPIServer(t *testing.T) {
	const pods = 5
	c := startCluster(t)
	c.prepare(t, pods)
	k, w, token := c.leader(t)
	o := scale.Order{BackendTarget: scale.BackendTarget{
		Name: "own", Model: "llama", Target: []byte(`{"name": "llama", "port": 8000, "path": "/v1"}`),
	}, Count: pods}
	t.Run("pods are instances", func(t *testing.T) { c.checkList(t, k, o, pods) })
	t.Run("a list whose continuation was compacted begins again", func(t *testing.T) {
		c.checkCompacted(t, w, k, o, pods)
	})
	t.Run("the scale is set", func(t *testing.T) { c.checkScale(t, w, k, o, pods) })
	t.Run("pods that are to go are marked or deleted", func(t *testing.T) { c.checkMarks(t, k, o) })
	t.Run("pods are watched", func(t *testing.T) { c.checkWatch(t, w, k, o) })
	t.Run("the account has the rights that are used", func(t *testing.T) {
		w.compare(t, granted(t))
	})
	t.Run("and no other", func(t *testing.T) { c.checkForbidden(t, token) })
	t.Run("a target of another autoscaler is left alone", func(t *testing.T) { c.checkOwned(t, k, o) })
}

func (c *cluster) checkList(t *testing.T, k *Kubernetes, o scale.Order, pods int) {
	found, err := k.List(t.Context(), o.BackendTarget)
	if err != nil || len(found) != pods {
		t.Fatalf("%d pods, %v", len(found), err)
	}
	first := found[0]
	if first.Endpoint != "http://10.1.0.1:8000/v1" || first.Began.IsZero() || first.State != scale.InstanceRunning {
		t.Errorf("%+v", found[0])
	}
	// A pod that a node still ends has a time of deletion. Nothing runs here, so that a finalizer keeps it.
	kept := map[string]any{"metadata": map[string]any{"finalizers": []any{"example.com/kept"}}}
	c.must(t, http.MethodPatch, podPath("llama-4"), merge, kept)
	c.must(t, http.MethodDelete, podPath("llama-4"), "", nil)
	unready := map[string]any{"status": conditions("False")}
	c.must(t, http.MethodPatch, podPath("llama-3")+"/status", merge, unready)
	found, err = k.List(t.Context(), o.BackendTarget)
	if err != nil || len(found) != pods {
		t.Fatalf("%d pods, %v", len(found), err)
	}
	if found[4].State != scale.InstanceEnding || found[3].State != scale.InstanceRunning || found[3].Endpoint != "" {
		t.Errorf("%+v", found[3:])
	}
	nobody := scale.BackendTarget{Name: "own", Target: []byte(`{"name": "nobody", "port": 1}`)}
	if _, err := k.List(t.Context(), nobody); status(err) != http.StatusNotFound {
		t.Errorf("a Deployment that does not exist: %v", err)
	}
}

// checkCompacted lists in pages of two, and has etcd forget the revision of the list after the first page.
func (c *cluster) checkCompacted(t *testing.T, w *witness, k *Kubernetes, o scale.Order, pods int) {
	defer func(before int) { pageMax = before }(pageMax)
	pageMax = 2
	compactions, pages := 0, 0
	w.before = func(r *http.Request) {
		if !strings.HasSuffix(r.URL.Path, "/pods") {
			return
		}
		pages++
		if r.URL.Query().Has("continue") && compactions == 0 {
			compactions++
			c.compact(t)
		}
	}
	defer func() { w.before = nil }()
	found, err := k.List(t.Context(), o.BackendTarget)
	if err != nil || len(found) != pods || compactions != 1 {
		t.Errorf("%d pods after %d compactions, %v", len(found), compactions, err)
	}
	if pages < 5 {
		t.Errorf("%d pages: the list did not begin again", pages)
	}
}

// compact writes once more and compacts etcd up to that revision, by the JSON gateway of etcd 3.4 and later.
func (c *cluster) compact(t *testing.T) {
	post := func(path, body string) string {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, c.etcd+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		reply, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		defer reply.Body.Close()
		said, err := io.ReadAll(reply.Body)
		if err != nil || reply.StatusCode != http.StatusOK {
			t.Fatalf("%s: %d %s %v", path, reply.StatusCode, said, err)
		}
		return string(said)
	}
	var put struct {
		Header struct {
			Revision string `json:"revision"`
		} `json:"header"`
	}
	if err := json.Unmarshal([]byte(post("/v3/kv/put", `{"key": "eA==", "value": "eA=="}`)), &put); err != nil {
		t.Fatal(err)
	}
	post("/v3/kv/compaction", fmt.Sprintf(`{"revision": %q, "physical": true}`, put.Header.Revision))
}

func (c *cluster) checkScale(t *testing.T, w *witness, k *Kubernetes, o scale.Order, pods int) {
	o.Count = pods + 2
	// Something else changes the Deployment between the read and the write: the first change is refused by 409.
	conflicts := 0
	w.before = func(r *http.Request) {
		if r.Method == http.MethodPatch && conflicts == 0 {
			conflicts++
			changed := map[string]any{"metadata": map[string]any{"annotations": map[string]any{"changed": "1"}}}
			c.must(t, http.MethodPatch, target, merge, changed)
		}
	}
	err := k.Apply(t.Context(), o)
	if w.before = nil; err != nil || c.replicas(t) != pods+2 || conflicts != 1 {
		t.Errorf("%d replicas after %d conflicts, %v", c.replicas(t), conflicts, err)
	}
	version := func() string {
		var s scaleObject
		if err := json.Unmarshal([]byte(c.must(t, http.MethodGet, target+"/scale", "", nil)), &s); err != nil {
			t.Fatal(err)
		}
		return s.Metadata.ResourceVersion
	}
	before := version()
	if err := k.Apply(t.Context(), o); err != nil || version() != before {
		t.Errorf("the same order again: %v, version %s and %s", err, before, version())
	}
}

func (c *cluster) checkMarks(t *testing.T, k *Kubernetes, o scale.Order) {
	before := c.replicas(t)
	c.must(t, http.MethodPatch, podPath("llama-3")+"/status", merge, map[string]any{"status": conditions("True")})
	found, err := k.List(t.Context(), o.BackendTarget)
	if err != nil {
		t.Fatal(err)
	}
	ending := func(i scale.BackendInstance) bool { return i.State == scale.InstanceEnding }
	alive := len(slices.DeleteFunc(found, ending)) // no controller makes pods for the other replicas
	o.Count, o.Remove = 0, []string{"llama-1", "gone-1"}
	if err := k.Apply(t.Context(), o); err != nil || c.replicas(t) != alive-1 {
		t.Errorf("%d replicas, with %d pods before: %v", c.replicas(t), alive, err)
	}
	var marked struct {
		Metadata struct {
			Annotations map[string]string `json:"annotations"`
		} `json:"metadata"`
	}
	said := c.must(t, http.MethodGet, podPath("llama-1"), "", nil)
	err = json.Unmarshal([]byte(said), &marked)
	cost := marked.Metadata.Annotations["controller.kubernetes.io/pod-deletion-cost"]
	if err != nil || cost != "-2147483647" {
		t.Errorf("annotations %v, %v", marked.Metadata.Annotations, err)
	}
	o.Count, o.Remove = before-1, []string{"llama-3"} // it is replaced
	if err := k.Apply(t.Context(), o); err != nil || c.replicas(t) != before-1 {
		t.Errorf("%d replicas of %d, %v", c.replicas(t), before-1, err)
	}
	code, said := c.ask(t, adminToken, http.MethodGet, podPath("llama-3"), "", nil)
	if code != http.StatusNotFound && !strings.Contains(said, "deletionTimestamp") {
		t.Errorf("a pod that is to be replaced: %d %s", code, said)
	}
}

// checkWatch changes pods, and has the watch go on after its connection was lost and after its version was compacted.
// Lists are asked for where the watch tells of a change, and not in between.
func (c *cluster) checkWatch(t *testing.T, w *witness, k *Kubernetes, o scale.Order) {
	changed := make(chan string, 1000)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go k.Watch(ctx, func(model string) { changed <- model })
	versions := make(chan string, 1000) // of the watches that were asked for
	w.mu.Lock()
	w.before = func(r *http.Request) {
		if r.URL.Query().Has("watch") {
			versions <- r.URL.Query().Get("resourceVersion")
		}
	}
	w.mu.Unlock()
	endpoint := func() string {
		found, err := k.List(t.Context(), o.BackendTarget)
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range found {
			if i.Name == "llama-2" {
				return i.Endpoint + " " + string(i.State)
			}
		}
		return "none"
	}
	await := func(what string, done func() bool) {
		t.Helper()
		for !done() {
			select {
			case <-changed:
			case <-time.After(time.Minute):
				t.Fatal(what)
			}
		}
	}
	for len(versions) == 0 { // Watch has begun, and a list with it
		endpoint()
		time.Sleep(10 * time.Millisecond)
	}
	const there = "http://10.1.0.3:8000/v1 running"
	status := func(ready string) {
		c.must(t, http.MethodPatch, podPath("llama-2")+"/status", merge, map[string]any{"status": conditions(ready)})
	}
	labels := func(app string) {
		c.must(t, http.MethodPatch, podPath("llama-2"), merge,
			map[string]any{"metadata": map[string]any{"labels": map[string]any{"app": app}}})
	}
	status("False")
	await("a pod that is not ready", func() bool { return endpoint() == " running" })
	status("True")
	await("a pod that is ready", func() bool { return endpoint() == there })
	labels("other")
	await("a pod whose labels do not match", func() bool { return endpoint() == "none" })
	labels("llama")
	await("a pod whose labels match again", func() bool { return endpoint() == there })
	// The version of the watch is forgotten, and its connection lost.
	c.compact(t)
	for len(versions) > 0 {
		<-versions
	}
	k.mu.Lock()
	one := k.watches.byName[o.Name]
	k.mu.Unlock()
	one.mu.Lock()
	one.version = "1"
	one.mu.Unlock()
	w.mu.Lock()
	body := w.stream
	w.mu.Unlock()
	if err := body.Close(); err != nil {
		t.Fatal(err)
	}
	status("False")
	await("a pod after the version was forgotten", func() bool { return endpoint() == " running" })
	status("True")
	await("a pod after that", func() bool { return endpoint() == there })
}

func (c *cluster) checkForbidden(t *testing.T, token string) {
	for _, right := range [][2]string{
		{http.MethodDelete, "/api/v1" + spaced + "pods"},
		{http.MethodDelete, "/api/v1/namespaces/kube-system/pods/llama-0"},
		{http.MethodPost, "/api/v1" + spaced + "pods"},
		{http.MethodGet, "/api/v1" + spaced + "secrets"},
		{http.MethodPatch, target},
		{http.MethodDelete, target},
		{http.MethodPatch, "/apis/apps/v1" + spaced + "statefulsets/llama/scale"},
		{http.MethodGet, "/api/v1/namespaces/kube-system/pods"},
		{http.MethodGet, "/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers"},
		{http.MethodPost, "/api/v1" + spaced + "serviceaccounts/penstock-leader/token"},
	} {
		if code, said := c.ask(t, token, right[0], right[1], merge, map[string]any{}); code != http.StatusForbidden {
			t.Errorf("%s %s: %d %s", right[0], right[1], code, said)
		}
	}
	code, said := c.ask(t, "not-a-token", http.MethodGet, target+"/scale", "", nil)
	if code != http.StatusUnauthorized {
		t.Errorf("a wrong token: %d %s", code, said)
	}
}

// checkOwned is tried with an autoscaler of the cluster and with KEDA's kind, which the server learns.
func (c *cluster) checkOwned(t *testing.T, k *Kubernetes, o scale.Order) {
	before := c.replicas(t)
	o.Count = before + 3
	reference := map[string]any{"apiVersion": "apps/v1", "kind": "Deployment", "name": "llama"}
	rivals := "/apis/autoscaling/v2" + spaced + "horizontalpodautoscalers"
	c.must(t, http.MethodPost, rivals, plain, map[string]any{
		"metadata": map[string]any{"name": "other"},
		"spec":     map[string]any{"scaleTargetRef": reference, "minReplicas": 1, "maxReplicas": 9},
	})
	if err := k.Apply(t.Context(), o); !errors.Is(err, scale.ErrNotOwned) || c.replicas(t) != before {
		t.Errorf("a HorizontalPodAutoscaler: %v, %d replicas of %d", err, c.replicas(t), before)
	}
	c.must(t, http.MethodDelete, rivals+"/other", "", nil)
	c.learnScaledObjects(t)
	scaled := "/apis/keda.sh/v1alpha1" + spaced + "scaledobjects"
	c.must(t, http.MethodPost, scaled, plain, map[string]any{
		"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "metadata": map[string]any{"name": "other"},
		"spec": map[string]any{"scaleTargetRef": map[string]any{"name": "llama"}},
	})
	if err := k.Apply(t.Context(), o); !errors.Is(err, scale.ErrNotOwned) || c.replicas(t) != before {
		t.Errorf("a ScaledObject: %v, %d replicas of %d", err, c.replicas(t), before)
	}
	c.must(t, http.MethodDelete, scaled+"/other", "", nil)
	if err := k.Apply(t.Context(), o); err != nil || c.replicas(t) != before+3 {
		t.Errorf("without owners: %v, %d replicas", err, c.replicas(t))
	}
}

func (c *cluster) learnScaledObjects(t *testing.T) {
	t.Helper()
	anything := map[string]any{"type": "object", "x-kubernetes-preserve-unknown-fields": true}
	c.must(t, http.MethodPost, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", plain, map[string]any{
		"metadata": map[string]any{"name": "scaledobjects.keda.sh"},
		"spec": map[string]any{
			"group": "keda.sh", "scope": "Namespaced",
			"names": map[string]any{"plural": "scaledobjects", "singular": "scaledobject", "kind": "ScaledObject"},
			"versions": []any{map[string]any{
				"name": "v1alpha1", "served": true, "storage": true,
				"schema": map[string]any{"openAPIV3Schema": anything},
			}},
		},
	})
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		code, said := c.ask(t, adminToken, http.MethodGet, "/apis/keda.sh/v1alpha1"+spaced+"scaledobjects", "", nil)
		if code == http.StatusOK {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("ScaledObjects are not served: %d %s", code, said)
		}
	}
}
