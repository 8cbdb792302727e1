// Package validate holds the tests of the manifests for Kubernetes: each object that kustomize makes must follow the
// schema that Kubernetes publishes for its kind, and must decode into its type of the Kubernetes API without an unknown
// or doubled field. It is a module of its own, since the product links nothing of Kubernetes.
package validate
