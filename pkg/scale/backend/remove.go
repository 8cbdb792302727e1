package backend

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/penstock/penstock/pkg/scale"
)

// replaced are the answers about a pod that is gone, or is not the one that was listed any more. Its controller makes
// up for it, and a lower number would end another one.
var replaced = []int{http.StatusNotFound, http.StatusConflict}

// removeMax is how many pods go by one order: each takes a request, and an order has 30 s. The next order has the rest.
const removeMax = 50

// remove has the pods go that an order names, at most removeMax, and returns how many were marked or deleted, how many
// there were that did not end, and the number that is to be set. Where the number falls by as many and all other pods
// are ready, they are marked by a deletion cost, by which their controller chooses them. It chooses a pod that is not
// running or not ready before, and no pod where the number stays. In these cases the pods are deleted. A pod that is
// started for one of them is chosen first when the number falls then.
//
// Where the leader may not delete pods (403, by a Role or by an admission webhook) they are marked in any case. Where
// the number would stay it is lowered for them while all others are ready, and the next order raises it. The error
// wraps scale.ErrCarriedOut then.
func (k *Kubernetes) remove(
	ctx context.Context, t KubernetesTarget, o scale.Order,
) (gone, exist, count int, err error) {
	if t.Selector, err = k.selector(ctx, t); err != nil {
		return 0, 0, o.Count, err
	}
	pods, _, err := k.pods(ctx, t)
	if err != nil {
		return 0, 0, o.Count, err
	}
	var now scaleObject
	if err := k.call(ctx, http.MethodGet, t.scalePath(), nil, &now); err != nil {
		return 0, 0, o.Count, err
	}
	var victims []pod
	ready := true // all others
	for _, p := range pods {
		switch {
		case t.instance(p).State == scale.InstanceEnding:
			continue
		case slices.Contains(o.Remove, p.Metadata.Name):
			victims = append(victims, p)
		default:
			ready = ready && p.Status.Phase == "Running" && p.ready()
		}
		exist++
	}
	victims = victims[:min(len(victims), removeMax)]
	falls := now.Spec.Replicas-o.Count >= len(victims)
	if ready && falls {
		gone, err = k.end(ctx, t, victims, k.mark)
		return gone, exist, o.Count, err
	}
	gone, err = k.end(ctx, t, victims, k.delete)
	if status(err) != http.StatusForbidden {
		return gone, exist, o.Count, err
	}
	gone, failed := k.end(ctx, t, victims, k.mark)
	if failed != nil {
		return 0, exist, o.Count, failed
	}
	count = o.Count
	if ready {
		count = min(count, now.Spec.Replicas-gone)
	}
	return gone, exist, count, fmt.Errorf("%w: %s, so that pods are marked and the number is lowered, by which a pod "+
		"that starts may go first: %w", scale.ErrCarriedOut, forbiddenBy(err), err)
}

// forbiddenBy says why pods may not be deleted. RBAC refuses in the words below; all other
// refusals are of admission.
func forbiddenBy(err error) string {
	if strings.Contains(err.Error(), `cannot delete resource "pods"`) {
		return "the Role of the leader lacks the verb delete of pods"
	}
	return "the cluster's admission refuses to have the leader delete pods"
}

// end has pods go one by one, and returns how many did. It ends at the first error.
func (k *Kubernetes) end(
	ctx context.Context, t KubernetesTarget, pods []pod, by func(context.Context, KubernetesTarget, pod) error,
) (ended int, err error) {
	for _, p := range pods {
		err := by(ctx, t, p)
		switch {
		case err == nil:
			ended++
		case !slices.Contains(replaced, status(err)):
			return 0, err
		}
	}
	return ended, nil
}

// mark has the controller of a pod choose it before others that are as far as it is.
func (k *Kubernetes) mark(ctx context.Context, t KubernetesTarget, p pod) error {
	const cheap = `{"metadata":{"annotations":{"controller.kubernetes.io/pod-deletion-cost":"-2147483647"}}}`
	if err := k.call(ctx, http.MethodPatch, t.podPath(p), []byte(cheap), nil); err != nil {
		return fmt.Errorf("mark pod %s: %w", p.Metadata.Name, err)
	}
	return nil
}

// delete ends the pod that was listed, and none that has its name since.
func (k *Kubernetes) delete(ctx context.Context, t KubernetesTarget, p pod) error {
	if p.Metadata.UID == "" {
		return errors.New("a pod without an id")
	}
	body, err := json.Marshal(map[string]any{"preconditions": map[string]string{"uid": p.Metadata.UID}})
	if err != nil {
		return fmt.Errorf("write the deletion of pod %s: %w", p.Metadata.Name, err)
	}
	if err := k.call(ctx, http.MethodDelete, t.podPath(p), body, nil); err != nil {
		return fmt.Errorf("delete pod %s: %w", p.Metadata.Name, err)
	}
	return nil
}

func (t KubernetesTarget) podPath(p pod) string {
	return join("api", "v1", "namespaces", t.Namespace, "pods", p.Metadata.Name)
}
