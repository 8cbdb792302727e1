package backend

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/penstock/penstock/internal/duration"
	"github.com/penstock/penstock/pkg/scale"
)

// Kubernetes sets the scale subresource of an object of the cluster, and lists and watches its pods. It speaks to
// the API server by REST with the token of the pod that it runs in. The target of a deployment is KubernetesTarget.
type Kubernetes struct {
	cfg    KubernetesConfig
	stream *http.Client // of watches: their answers last

	mu      sync.Mutex
	watches *watches  // nil: Watch does not run
	refusal error     // the last answer that asked to wait
	until   time.Time // no call is made before
}

// KubernetesConfig says where the API server is.
type KubernetesConfig struct {
	Server    string                 // such as https://10.0.0.1:443
	Token     func() (string, error) // asked before each request: mounted tokens change; nil: none
	Client    *http.Client           // with a limit of its own; 5 s if nil. Watches are sent without the limit
	Namespace string                 // of targets that name none
	Log       *slog.Logger           // nowhere if nil
}

// KubernetesTarget names an object with a scale subresource, and how its pods are called.
type KubernetesTarget struct {
	Group     string `json:"group,omitempty"`     // apps
	Version   string `json:"version,omitempty"`   // v1
	Resource  string `json:"resource,omitempty"`  // deployments
	Kind      string `json:"kind,omitempty"`      // Deployment; the kind that autoscalers of the cluster refer to
	Namespace string `json:"namespace,omitempty"` // that of the leader
	Name      string `json:"name"`
	Selector  string `json:"selector,omitempty"` // of pods; that of the scale subresource if empty
	Port      int    `json:"port"`               // of the worker in its pod
	Path      string `json:"path,omitempty"`     // of its endpoint
	Slots     int    `json:"slots,omitempty"`    // 0: those of the policy
}

// Files that Kubernetes mounts into a pod.
const mounted = "/var/run/secrets/kubernetes.io/serviceaccount/"

// InCluster returns the configuration that Kubernetes gives each pod: the address in its environment, the
// certificate of the API server, and a token that is read anew for each request.
func InCluster() (KubernetesConfig, error) {
	host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")
	if host == "" || port == "" {
		return KubernetesConfig{}, errors.New("KUBERNETES_SERVICE_HOST and _PORT are not set: this is no pod")
	}
	ca, err := os.ReadFile(mounted + "ca.crt")
	if err != nil {
		return KubernetesConfig{}, fmt.Errorf("read the certificate of the API server: %w", err)
	}
	namespace, err := os.ReadFile(mounted + "namespace")
	if err != nil {
		return KubernetesConfig{}, fmt.Errorf("read the namespace of this pod: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return KubernetesConfig{}, errors.New("the certificate of the API server cannot be read")
	}
	dialer := net.Dialer{Timeout: 5 * time.Second}
	transport := &http.Transport{
		DialContext:         dialer.DialContext,
		TLSHandshakeTimeout: 5 * time.Second, // the end of a request does not end its handshake
		TLSClientConfig:     &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
		ForceAttemptHTTP2:   true, // the watches of all deployments share a connection
		HTTP2:               &http.HTTP2Config{SendPingTimeout: 10 * time.Second, PingTimeout: 5 * time.Second},
	}
	return KubernetesConfig{
		Server: "https://" + net.JoinHostPort(host, port), Namespace: strings.TrimSpace(string(namespace)),
		Client: &http.Client{Transport: transport, Timeout: 5 * time.Second},
		Token: func() (string, error) {
			token, err := os.ReadFile(mounted + "token")
			return strings.TrimSpace(string(token)), err
		},
	}, nil
}

// NewKubernetes returns the backend.
func NewKubernetes(cfg KubernetesConfig) *Kubernetes {
	cfg.Client = cmp.Or(cfg.Client, &http.Client{Timeout: 5 * time.Second})
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	stream := *cfg.Client
	stream.Timeout = 0
	return &Kubernetes{cfg: cfg, stream: &stream}
}

func (k *Kubernetes) target(d scale.BackendTarget) (KubernetesTarget, error) {
	var t KubernetesTarget
	if err := json.Unmarshal(d.Target, &t); err != nil || t.Name == "" || t.Port < 1 || t.Port > 65535 {
		return t, fmt.Errorf("target of deployment %q: want name and port, and fields of a Kubernetes object", d.Name)
	}
	t.Group, t.Version = cmp.Or(t.Group, "apps"), cmp.Or(t.Version, "v1")
	t.Resource, t.Kind = cmp.Or(t.Resource, "deployments"), cmp.Or(t.Kind, "Deployment")
	t.Namespace = cmp.Or(t.Namespace, k.cfg.Namespace, "default")
	if t.Resource == "statefulsets" {
		return t, fmt.Errorf("target of deployment %q: a StatefulSet ends its last pod, whichever is idle: "+
			"make it a Deployment", d.Name)
	}
	return t, nil
}

// join makes a path of names that come from a target: each is one element, whatever is in it.
func join(elements ...string) string {
	for i, e := range elements {
		elements[i] = url.PathEscape(e)
	}
	return "/" + strings.Join(elements, "/")
}

func (t KubernetesTarget) scalePath() string {
	return join("apis", t.Group, t.Version, "namespaces", t.Namespace, t.Resource, t.Name, "scale")
}

// scaleObject is the part of autoscaling/v1 Scale that is read.
type scaleObject struct {
	Metadata struct {
		ResourceVersion string `json:"resourceVersion"`
	} `json:"metadata"`
	Spec struct {
		Replicas int `json:"replicas"`
	} `json:"spec"`
	Status struct {
		Replicas int    `json:"replicas"` // pods that the controller has
		Selector string `json:"selector"`
	} `json:"status"`
}

// Apply implements scale.Backend. The number is never lowered by more than there are pods that are to go, see remove,
// and replicas of which no pod exists, see setReplicas.
func (k *Kubernetes) Apply(ctx context.Context, o scale.Order) error {
	t, err := k.target(o.BackendTarget)
	if err != nil {
		return err
	}
	if err := k.owned(ctx, t); err != nil {
		return err
	}
	defer k.watchOf(o.BackendTarget, t).ordered(o.Count)
	gone, pods, count := 0, podsUnknown, o.Count
	var forbidden error
	if len(o.Remove) > 0 {
		gone, pods, count, err = k.remove(ctx, t, o)
		if errors.Is(err, scale.ErrCarriedOut) {
			forbidden, err = err, nil
		}
		if err != nil {
			return err
		}
	}
	err = k.setReplicas(ctx, t, count, gone, pods)
	if errors.Is(err, errHiddenPods) && o.Count > o.Current-len(o.Remove) {
		err = nil // it would be a start that failed; the rounds that follow the start have the rest
	}
	return cmp.Or(err, forbidden)
}

// errHiddenPods is wrapped where the number was not lowered as far as ordered, since pods exist that are not listed, or
// the count of their controller is out of date.
var errHiddenPods = errors.New("not all pods are listed")

// podsUnknown is the number of pods where they were not listed.
const podsUnknown = -1

// patchTries bounds how often a change is tried whose object something else has changed meanwhile (409).
const patchTries = 5

// setReplicas brings the number to count, and lowers it by no more than are gone of the pods, of which there were so
// many, and by the replicas of which no pod exists. A quota or an admission webhook keeps such pods from being made:
// they would come when it does so no more, and nothing may ask for this deployment then. They exist neither in the
// list nor for their controller, which counts pods of the target that a selector of ours leaves out.
func (k *Kubernetes) setReplicas(ctx context.Context, t KubernetesTarget, count, gone, pods int) error {
	for tries := 1; ; tries++ {
		var now scaleObject
		if err := k.call(ctx, http.MethodGet, t.scalePath(), nil, &now); err != nil {
			return err
		}
		if pods == podsUnknown && count < now.Spec.Replicas {
			var err error
			if pods, err = k.alive(ctx, t); err != nil {
				return err
			}
		}
		exist := min(now.Spec.Replicas, max(pods, now.Status.Replicas))
		wanted := max(count, exist-gone)
		var unlisted error
		if wanted > count && now.Status.Replicas > pods {
			unlisted = fmt.Errorf("%w: %s %s has %d pods, of which its selector finds %d: the number stays at %d",
				errHiddenPods, t.Kind, t.Name, now.Status.Replicas, pods, wanted)
		}
		if wanted == now.Spec.Replicas {
			return unlisted
		}
		var patch scaleObject
		patch.Metadata.ResourceVersion, patch.Spec.Replicas = now.Metadata.ResourceVersion, wanted
		body, err := json.Marshal(map[string]any{"metadata": patch.Metadata, "spec": patch.Spec})
		if err != nil {
			return fmt.Errorf("write scale: %w", err)
		}
		err = k.call(ctx, http.MethodPatch, t.scalePath(), body, nil)
		if status(err) != http.StatusConflict || tries == patchTries {
			return cmp.Or(err, unlisted)
		}
	}
}

// alive is how many pods of a target exist and do not end.
func (k *Kubernetes) alive(ctx context.Context, t KubernetesTarget) (int, error) {
	var err error
	if t.Selector, err = k.selector(ctx, t); err != nil {
		return 0, err
	}
	pods, _, err := k.pods(ctx, t)
	n := 0
	for _, p := range pods {
		if t.instance(p).State != scale.InstanceEnding {
			n++
		}
	}
	return n, err
}

// owned returns an error wrapping scale.ErrNotOwned where an autoscaler of the cluster has the target. Where that
// cannot be told, nothing is changed.
func (k *Kubernetes) owned(ctx context.Context, t KubernetesTarget) error {
	for _, rival := range [][3]string{
		{"autoscaling", "v2", "horizontalpodautoscalers"}, {"keda.sh", "v1alpha1", "scaledobjects"},
	} {
		var found struct {
			Items []struct {
				Metadata struct {
					Name string `json:"name"`
				} `json:"metadata"`
				Spec struct {
					Target struct {
						Kind string `json:"kind"`
						Name string `json:"name"`
					} `json:"scaleTargetRef"`
				} `json:"spec"`
			} `json:"items"`
		}
		path := join("apis", rival[0], rival[1], "namespaces", t.Namespace, rival[2])
		err := k.call(ctx, http.MethodGet, path, nil, &found)
		if status(err) == http.StatusNotFound {
			continue // the cluster has no such kind
		}
		if err != nil {
			return fmt.Errorf("find autoscalers of the target: %w", err)
		}
		for _, item := range found.Items {
			if item.Spec.Target.Name == t.Name && cmp.Or(item.Spec.Target.Kind, "Deployment") == t.Kind {
				return fmt.Errorf("%s %s: %w: %s %s", t.Kind, t.Name, scale.ErrNotOwned, rival[2], item.Metadata.Name)
			}
		}
	}
	return nil
}

// statusError is an answer of the API server, or of the receiver of orders, that is no success.
type statusError struct {
	code   int
	doing  string
	reason string
	after  time.Duration // that the server asks to wait
}

// RetryAfter is how long the server asks to wait, see scale.Backend.
func (e *statusError) RetryAfter() time.Duration { return e.after }

func (e *statusError) Error() string {
	return fmt.Sprintf("%s: status %d: %s", e.doing, e.code, e.reason)
}

// status is the status of an answer, 0 if there was none.
func status(err error) int {
	var answered *statusError
	if errors.As(err, &answered) {
		return answered.code
	}
	return 0
}

// answerMax bounds an answer in bytes.
const answerMax = 32 << 20

// request makes a request with the token of now.
func (k *Kubernetes) request(ctx context.Context, method, path string, body []byte) (*http.Request, error) {
	request, err := http.NewRequestWithContext(ctx, method, k.cfg.Server+path, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("make a request: %w", err)
	}
	request.Header.Set("Accept", "application/json")
	switch {
	case method == http.MethodDelete:
		request.Header.Set("Content-Type", "application/json")
	case body != nil:
		request.Header.Set("Content-Type", "application/merge-patch+json")
	}
	if k.cfg.Token != nil {
		token, err := k.cfg.Token()
		if err != nil {
			return nil, fmt.Errorf("read the token of this pod: %w", err)
		}
		request.Header.Set("Authorization", "Bearer "+token)
	}
	return request, nil
}

// refused is the error of an answer that is no success.
func refused(doing string, reply *http.Response, text []byte) error {
	var said struct {
		Message string `json:"message"`
	}
	_ = json.Unmarshal(text, &said)
	return &statusError{
		code: reply.StatusCode, doing: doing, reason: cmp.Or(said.Message, http.StatusText(reply.StatusCode)),
		after: duration.RetryAfter(reply.Header, time.Now(), retryMax),
	}
}

// paused returns the answer of the API server that asked to wait until later than now: it limits how much the leader
// may ask in all (429), or is about to stop (503).
func (k *Kubernetes) paused() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if left := time.Until(k.until); left > 0 {
		return fmt.Errorf("the API server is not asked for another %s: %w", left.Round(time.Second), k.refusal)
	}
	return nil
}

func (k *Kubernetes) pause(err error) {
	var answered *statusError
	if !errors.As(err, &answered) || answered.after == 0 ||
		answered.code != http.StatusTooManyRequests && answered.code != http.StatusServiceUnavailable {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.refusal, k.until = err, time.Now().Add(answered.RetryAfter())
}

func (k *Kubernetes) call(ctx context.Context, method, path string, body []byte, into any) error {
	doing := method + " " + strings.SplitN(path, "?", 2)[0]
	if err := k.paused(); err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	request, err := k.request(ctx, method, path, body)
	if err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	reply, err := k.cfg.Client.Do(request)
	if err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	defer reply.Body.Close()
	text, err := io.ReadAll(io.LimitReader(reply.Body, answerMax))
	if err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	if !slices.Contains([]int{http.StatusOK, http.StatusCreated, http.StatusAccepted}, reply.StatusCode) {
		err := refused(doing, reply, text)
		k.pause(err)
		return err
	}
	if into == nil {
		return nil
	}
	if err := json.Unmarshal(text, into); err != nil {
		return fmt.Errorf("%s: the answer is not readable: %w", doing, err)
	}
	return nil
}
