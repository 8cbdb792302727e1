package backend

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/penstock/penstock/pkg/scale"
)

// pod is the part of a Pod that is read.
type pod struct {
	Metadata struct {
		Name    string            `json:"name"`
		UID     string            `json:"uid"`
		Version string            `json:"resourceVersion"`
		Created time.Time         `json:"creationTimestamp"`
		Deleted *time.Time        `json:"deletionTimestamp"`
		Labels  map[string]string `json:"labels"`
	} `json:"metadata"`
	Status struct {
		Phase      string `json:"phase"`
		PodIP      string `json:"podIP"`
		Conditions []struct {
			Type   string `json:"type"`
			Status string `json:"status"`
		} `json:"conditions"`
	} `json:"status"`
}

// revisionLabel tells the pods of the ReplicaSets of a Deployment apart.
const revisionLabel = "pod-template-hash"

func (p pod) ready() bool {
	for _, c := range p.Status.Conditions {
		if c.Type == "Ready" {
			return c.Status == "True"
		}
	}
	return false
}

// instance is the pod as an instance. It has an endpoint once it is ready. One that is being deleted or has ended
// does not count: its controller replaces it.
func (t KubernetesTarget) instance(p pod) scale.BackendInstance {
	i := scale.BackendInstance{
		Name: p.Metadata.Name, Began: p.Metadata.Created, State: scale.InstanceRunning, Slots: t.Slots,
		Revision: p.Metadata.Labels[revisionLabel],
	}
	switch {
	case p.Metadata.Deleted != nil, p.Status.Phase == "Failed", p.Status.Phase == "Succeeded":
		i.State = scale.InstanceEnding
	case p.ready() && p.Status.PodIP != "":
		i.Endpoint = "http://" + net.JoinHostPort(p.Status.PodIP, strconv.Itoa(t.Port)) + t.Path
	}
	return i
}

// List implements scale.Backend. It answers from the watch of the deployment where that is current, see podWatch.
func (k *Kubernetes) List(ctx context.Context, d scale.BackendTarget) ([]scale.BackendInstance, error) {
	t, err := k.target(d)
	if err != nil {
		return nil, err
	}
	w := k.watchOf(d, t)
	pods, mark, current := w.current()
	if !current {
		if t.Selector, err = k.selector(ctx, t); err != nil {
			return nil, err
		}
		var version string
		if pods, version, err = k.pods(ctx, t); err != nil {
			return nil, err
		}
		w.listed(mark, t.Selector, pods, version)
	}
	found := make([]scale.BackendInstance, 0, len(pods))
	for _, p := range pods {
		found = append(found, t.instance(p))
	}
	return found, nil
}

// selector is that of the target, or of its scale subresource.
func (k *Kubernetes) selector(ctx context.Context, t KubernetesTarget) (string, error) {
	if t.Selector != "" {
		return t.Selector, nil
	}
	var s scaleObject
	if err := k.call(ctx, http.MethodGet, t.scalePath(), nil, &s); err != nil {
		return "", err
	}
	if s.Status.Selector == "" {
		return "", fmt.Errorf("%s %s has no selector of pods: name one in the target", t.Resource, t.Name)
	}
	return s.Status.Selector, nil
}

func (t KubernetesTarget) podsPath(query url.Values) string {
	return join("api", "v1", "namespaces", t.Namespace, "pods") + "?" + query.Encode()
}

// pageMax is how many pods a page of a list has at most.
var pageMax = 500

// listTries bounds how often a list begins again whose continuation the server has forgotten (410).
const listTries = 3

// pods lists in pages, by consistent reads, and returns the version from which a watch goes on. A list that cannot
// be completed is an error: a part of it would read as instances that are gone.
func (k *Kubernetes) pods(ctx context.Context, t KubernetesTarget) (all []pod, version string, err error) {
	next := ""
	for tries := 0; ; {
		query := url.Values{"labelSelector": {t.Selector}, "limit": {strconv.Itoa(pageMax)}}
		if next != "" {
			query.Set("continue", next)
		}
		var page struct {
			Kind     string `json:"kind"`
			Metadata struct {
				Continue string `json:"continue"`
				Version  string `json:"resourceVersion"`
			} `json:"metadata"`
			Items []pod `json:"items"`
		}
		err := k.call(ctx, http.MethodGet, t.podsPath(query), nil, &page)
		if status(err) == http.StatusGone && tries < listTries {
			tries++
			all, next = nil, ""
			continue
		}
		if err != nil {
			return nil, "", err
		}
		if page.Kind != "PodList" {
			return nil, "", fmt.Errorf("the API server answered %q where a list of pods was asked for", page.Kind)
		}
		all = append(all, page.Items...)
		if next = page.Metadata.Continue; next == "" {
			return all, page.Metadata.Version, nil
		}
	}
}
