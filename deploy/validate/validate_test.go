package validate

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	kjson "k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/kustomize/kyaml/yaml"

	batchv1 "k8s.io/api/batch/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const root = "../kubernetes"

// objects builds a kustomization and decodes each object strictly.
func objects(t *testing.T, dir string) []runtime.Object {
	t.Helper()
	made, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	if err != nil {
		t.Fatal(err)
	}
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		appsv1.AddToScheme, batchv1.AddToScheme, corev1.AddToScheme, networkingv1.AddToScheme, policyv1.AddToScheme, rbacv1.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	strict := kjson.NewSerializerWithOptions(kjson.DefaultMetaFactory, scheme, scheme, kjson.SerializerOptions{Yaml: true, Strict: true})
	var all []runtime.Object
	for _, resource := range made.Resources() {
		text, err := resource.AsYAML()
		if err != nil {
			t.Fatal(err)
		}
		object, _, err := strict.Decode(text, nil, nil)
		if err != nil {
			t.Errorf("%s: %v", resource.CurId(), err)
			continue
		}
		all = append(all, object)
	}
	return all
}

func TestManifestsDecodeStrictly(t *testing.T) {
	overlays, err := filepath.Glob(root + "/overlays/*")
	if err != nil || len(overlays) == 0 {
		t.Fatalf("no overlays: %v", err)
	}
	for _, dir := range append(overlays, root+"/base") {
		if n := len(objects(t, dir)); n < 15 {
			t.Errorf("%s makes %d objects", dir, n)
		}
	}
}

// The leader with an autoscaler has a token and its switches, KEDA reaches it, and no other program has more than before.
func TestTheScaledLeaderHasItsTokenAndPort(t *testing.T) {
	var leader, service, policy bool
	for _, object := range objects(t, root+"/overlays/scaled") {
		switch o := object.(type) {
		case *appsv1.Deployment:
			spec := o.Spec.Template.Spec
			args := strings.Join(spec.Containers[0].Args, " ")
			if o.Name != "penstock-leader" {
				if *spec.AutomountServiceAccountToken || strings.Contains(args, "scale") {
					t.Errorf("%s has a token, or scales", o.Name)
				}
				continue
			}
			leader = *spec.AutomountServiceAccountToken && spec.Containers[0].Ports[2].ContainerPort == 8423 &&
				strings.Contains(args, "--scale-kubernetes --scale-keda-listen=:8423")
		case *corev1.ServiceAccount:
			if *o.AutomountServiceAccountToken != (o.Name == "penstock-leader") {
				t.Errorf("account %s: token mounted: %v", o.Name, *o.AutomountServiceAccountToken)
			}
		case *corev1.Service:
			if o.Name == "penstock-leader" {
				service = o.Spec.Ports[1].Port == 8423 && o.Spec.Ports[1].TargetPort == intstr.FromString("keda")
			}
		case *networkingv1.NetworkPolicy:
			policy = policy || o.Spec.Ingress != nil && o.Spec.Ingress[0].Ports[0].Port.IntValue() == 8423
		}
	}
	if !leader || !service || !policy {
		t.Errorf("as wanted: leader %v, service %v, policy %v", leader, service, policy)
	}
}

// The test above fails for a field that does not exist.
func TestUnknownFieldIsRefused(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := appsv1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	strict := kjson.NewSerializerWithOptions(kjson.DefaultMetaFactory, scheme, scheme, kjson.SerializerOptions{Yaml: true, Strict: true})
	_, _, err := strict.Decode([]byte("apiVersion: apps/v1\nkind: Deployment\nspec: {replicaz: 2}\n"), nil, nil)
	if err == nil || !strings.Contains(err.Error(), "replicaz") {
		t.Errorf("a misspelt field was taken: %v", err)
	}
}

// Each program runs without rights of the machine, stops in time, is probed where clients cannot keep probes out, has a label
// by which it is applied alone, and reads secrets by reference.
func TestProgramsAreConfined(t *testing.T) {
	programs := 0
	for _, object := range objects(t, root+"/overlays/example") {
		d, ok := object.(*appsv1.Deployment)
		if !ok {
			continue
		}
		programs++
		spec := d.Spec.Template.Spec
		c := spec.Containers[0]
		for what, holds := range map[string]bool{
			"non-root user":              *spec.SecurityContext.RunAsNonRoot,
			"group that reads secrets":   *spec.SecurityContext.FSGroup == 65532,
			"seccomp profile":            spec.SecurityContext.SeccompProfile.Type == corev1.SeccompProfileTypeRuntimeDefault,
			"no token of the API":        !*spec.AutomountServiceAccountToken,
			"no privileges":              !*c.SecurityContext.AllowPrivilegeEscalation && c.SecurityContext.Capabilities.Drop[0] == "ALL",
			"read-only root file system": *c.SecurityContext.ReadOnlyRootFilesystem,
			"memory limit":               !c.Resources.Limits.Memory().IsZero(),
			"image of the overlay":       c.Image == "registry.example/penstock:v1.0.0",
			"selector of its own labels": metav1.FormatLabelSelector(d.Spec.Selector) == labels.Set(d.Spec.Selector.MatchLabels).String() && labels.Set(d.Spec.Selector.MatchLabels).AsSelector().Matches(labels.Set(d.Spec.Template.Labels)),
			"label of its name":          d.Labels["app.kubernetes.io/name"] == d.Name,
			"drain before the kill":      c.Lifecycle.PreStop.Sleep.Seconds > 0 && *spec.TerminationGracePeriodSeconds > c.Lifecycle.PreStop.Sleep.Seconds+30,
		} {
			if !holds {
				t.Errorf("%s has no %s", d.Name, what)
			}
		}
		port, scheme := "metrics", corev1.URIScheme("")
		if d.Name == "penstock-tasknode" { // it has one listener
			port, scheme = "http", corev1.URISchemeHTTPS
		}
		for _, probe := range []*corev1.Probe{c.StartupProbe, c.LivenessProbe, c.ReadinessProbe} {
			if h := probe.HTTPGet; h.Port != intstr.FromString(port) || h.Scheme != scheme ||
				!slices.ContainsFunc(c.Ports, func(p corev1.ContainerPort) bool { return p.Name == port }) {
				t.Errorf("%s is probed on port %v by %q", d.Name, h.Port, h.Scheme)
			}
		}
		for _, e := range c.Env {
			if strings.Contains(e.Name, "URL") && (e.ValueFrom == nil || e.ValueFrom.SecretKeyRef == nil) {
				t.Errorf("%s has %s in clear", d.Name, e.Name)
			}
		}
	}
	if programs != 3 {
		t.Errorf("%d programs, want 3", programs)
	}
}

// A gateway refuses bodies before it takes more memory than it has: one that is read may take twice its size.
func TestBodiesFitIntoTheMemoryOfAGateway(t *testing.T) {
	found := false
	for _, object := range objects(t, root+"/base") {
		d, ok := object.(*appsv1.Deployment)
		if !ok || d.Name != "penstock-gateway" {
			continue
		}
		c := d.Spec.Template.Spec.Containers[0]
		for _, arg := range c.Args {
			text, is := strings.CutPrefix(arg, "--bodies-bytes-max=")
			if !is {
				continue
			}
			bytes, err := strconv.ParseInt(text, 10, 64)
			if limit := c.Resources.Limits.Memory().Value(); err != nil || 2*bytes > limit*3/4 {
				t.Errorf("bodies of %s bytes on %d bytes of memory: %v", text, limit, err)
			}
			found = true
		}
	}
	if !found {
		t.Error("the gateway takes bodies of the default, 1 GiB")
	}
}

// Headers of models may refer to each file below worker.SecretsDir, and go to endpoints in clear: no key of a program's
// own is there.
func TestHeadersOfModelsReachNoKeyOfAProgram(t *testing.T) {
	const referable, own = "/run/secrets/penstock", "penstock-keys"
	for _, dir := range []string{root + "/base", root + "/overlays/example", root + "/overlays/scaled"} {
		for _, object := range objects(t, dir) {
			d, ok := object.(*appsv1.Deployment)
			if !ok {
				continue
			}
			spec := d.Spec.Template.Spec
			secrets := map[string]string{}
			for _, v := range spec.Volumes {
				if v.Secret != nil {
					secrets[v.Name] = v.Secret.SecretName
				}
			}
			c := spec.Containers[0]
			for _, m := range c.VolumeMounts {
				if strings.HasPrefix(m.MountPath, referable) && secrets[m.Name] != own {
					t.Errorf("%s has secret %q at %s, to which headers of models may refer", d.Name, secrets[m.Name], m.MountPath)
				}
			}
			for _, arg := range c.Args {
				if strings.Contains(arg, "file:"+referable) {
					t.Errorf("%s: headers of models may refer to the file of %s", d.Name, arg)
				}
			}
		}
	}
}

// Budgets, services and policies select pods that there are.
func TestSelectorsFindPods(t *testing.T) {
	var pods []labels.Set
	selectors := map[string]*metav1.LabelSelector{}
	for _, object := range objects(t, root+"/base") {
		switch o := object.(type) {
		case *appsv1.Deployment:
			pods = append(pods, o.Spec.Template.Labels)
		case *policyv1.PodDisruptionBudget:
			selectors["budget "+o.Name] = o.Spec.Selector
		case *networkingv1.NetworkPolicy:
			selectors["policy "+o.Name] = &o.Spec.PodSelector
		case *corev1.Service:
			selectors["service "+o.Name] = &metav1.LabelSelector{MatchLabels: o.Spec.Selector}
		}
	}
	for name, selector := range selectors {
		s, err := metav1.LabelSelectorAsSelector(selector)
		found := false
		for _, pod := range pods {
			found = found || err == nil && s.Matches(pod)
		}
		if !found {
			t.Errorf("%s selects no pod: %v", name, err)
		}
	}
}

// Units name programs that are in cmd/, and wait for their drain.
func TestUnitsAndComposeNamePrograms(t *testing.T) {
	units, err := filepath.Glob("../systemd/*.service")
	if err != nil || len(units) < 4 {
		t.Fatalf("%d units, %v", len(units), err)
	}
	compose, err := os.ReadFile("../compose/compose.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, program := range []string{"leader", "tasknode", "gateway"} {
		unit, err := os.ReadFile(fmt.Sprintf("../systemd/penstock-%s.service", program))
		if err != nil || !strings.Contains(string(unit), "ExecStart=/usr/local/bin/"+program+"\n") {
			t.Errorf("no unit starts %s: %v", program, err)
		}
		if !strings.Contains(string(compose), "/usr/local/bin/"+program+",") {
			t.Errorf("compose.yaml does not start %s", program)
		}
	}
}

// After a start of the machine Docker starts what has a policy for it: the database as well as the programs.
func TestWhatRunsInComposeIsStartedAgain(t *testing.T) {
	text, err := os.ReadFile("../compose/compose.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var compose struct {
		Services map[string]struct {
			Restart string `yaml:"restart"`
		} `yaml:"services"`
	}
	if err := yaml.Unmarshal(text, &compose); err != nil {
		t.Fatal(err)
	}
	for name, service := range compose.Services {
		if once := name == "migrate" || name == "schema"; once != (service.Restart == "") {
			t.Errorf("%s has the restart policy %q", name, service.Restart)
		}
	}
	if len(compose.Services) != 6 {
		t.Errorf("%d services, want 6", len(compose.Services))
	}
}

// Where workers share /tmp with the machine they can write to it: ProtectSystem=strict makes all but private directories
// read-only.
func TestLocalWorkersHaveAWritableTmp(t *testing.T) {
	conf, err := os.ReadFile("../systemd/scale-local.conf")
	if err != nil {
		t.Fatal(err)
	}
	if text := string(conf); !strings.Contains(text, "\nPrivateTmp=no\n") || !strings.Contains(text, "\nReadWritePaths=/tmp /var/tmp\n") {
		t.Error("scale-local.conf leaves workers without a writable /tmp")
	}
}
