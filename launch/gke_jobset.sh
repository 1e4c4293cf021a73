#!/usr/bin/env bash
# Runs a command on TPU slices of a GKE cluster, as a JobSet: one Job a slice, one pod a host.
#   bash launch/gke_jobset.sh --name=N --image=I --type=v5p --topology=4x4x4 --wait -- \
#       python -m prope.train --config=configs/gemma_2b_wiki.py --workdir=gs://B/W
#   --name=N             of the JobSet: at most 40 small letters, digits and hyphens
#   --image=I            built and pushed by launch/image.sh
#   --type=v5p           v5e, v5p or v6e
#   --topology=4x4x4     shape of a slice in chips, as the node pool's
#   --slices=1           number of slices
#   --service_account=default   of Kubernetes; one that may write to the bucket
#   --spot               use Spot nodes
#   --max_restarts=50    of the JobSet: a pod that ends restarts all; exit codes 1, 2 and 130 end the JobSet
#   --wait               wait until the JobSet ends. Completed: exit code 0, and the last line of process 0 on stdout;
#                        failed: exit code 1
#   --poll=30            seconds between polls, with --wait
#   --dry-run            print the YAML and run nothing
# A JobSet of that name that has ended is replaced; a running one is left alone. The cluster needs JobSet 0.7 or later.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

name='' image='' type='' topology='' slices=1 service_account=default spot='' max_restarts=50
wait='' poll=30 dry_run=''
parse_flags "name image type topology slices service_account max_restarts poll" "spot wait dry_run" "$@"
shift "$parsed"
[[ $name =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] ||
  fail "--name=$name: must be of small letters, digits and hyphens, begin with a letter, 40 at most"
[[ $image =~ ^[-A-Za-z0-9_./:@]+$ ]] || fail "--image=$image: give the image to run; launch/image.sh builds one"
for flag in slices max_restarts poll; do
  positive "--$flag" "${!flag}"
done
[[ $service_account =~ ^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$ ]] ||
  fail "--service_account=$service_account: must be of small letters, digits, hyphens and dots"
(($#)) || fail "no command: give it after --, as in: -- python -m prope.train --config=.. --workdir=gs://BUCKET/$name"
case $type in
  v5e) accelerator=tpu-v5-lite-podslice sides=2 ;;
  v5p) accelerator=tpu-v5p-slice sides=3 ;;
  v6e) accelerator=tpu-v6e-slice sides=2 ;;
  *) fail "--type=$type: must be v5e, v5p or v6e" ;;
esac
chips=0
[[ ! $topology =~ ^[1-9][0-9]?(x[1-9][0-9]?){$((sides - 1))}$ ]] || chips=$((${topology//x/*}))
((chips == 1 || (chips > 0 && chips % 4 == 0))) ||
  fail "--topology=$topology: a slice of $type has $sides sides and a multiple of 4 chips, such as 2x4 (v5p: 4x4x4)"
per_host=$((chips < 4 ? chips : 4)) hosts=$(((chips + 3) / 4))
((slices == 1 || hosts > 1)) || fail "--slices=$slices: several slices need several hosts each; $topology has one"
[[ ! $spot ]] || spot='cloud.google.com/gke-spot: "true"'
# YAML reads JSON as it is; Kubernetes would expand $( in a word.
# shellcheck disable=SC2016
words=$("${PYTHON:-python}" -c 'import json, sys; print(json.dumps([w.replace("$(", "$$(") for w in sys.argv[1:]]))' "$@")

yaml=$(
  cat <<YAML
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: "$name"
  labels: {app.kubernetes.io/name: prope}
  annotations:
    prope/commit: "$(commit)" # of the clone that started it; a run records the commit of the image
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool # a slice to itself for every Job
spec:
  network: {enableDNSHostnames: true} # the hosts of a slice find each other by name
  failurePolicy:
    maxRestarts: $max_restarts # of all pods together; the command goes on from its last checkpoint
    rules:
      - {name: final, action: FailJobSet, onJobFailureReasons: [PodFailurePolicy]}
  replicatedJobs:
    - name: slice
      replicas: $slices
      template:
        spec:
          completionMode: Indexed
          completions: $hosts
          parallelism: $hosts
          backoffLimit: 0 # a pod that ends restarts the JobSet, not itself: the others wait for it in vain
          podFailurePolicy:
            rules:
              - action: FailJob # failed, invalid input, Ctrl-C: to start again would end alike
                onExitCodes: {containerName: prope, operator: In, values: [1, 2, 130]}
          template:
            spec:
              restartPolicy: Never
              serviceAccountName: "$service_account"
              terminationGracePeriodSeconds: 600 # from SIGTERM on; time to save
              nodeSelector:
                cloud.google.com/gke-tpu-accelerator: $accelerator
                cloud.google.com/gke-tpu-topology: $topology
                $spot
              containers:
                - name: prope
                  image: "$image"
                  workingDir: /prope
                  # The TPU's driver locks host memory. Source: GKE's documentation, "Privileged mode" for TPUs.
                  command: [bash, -c, 'ulimit -l 68719476736 && exec bash launch/run.sh "\$@"', prope, $type]
                  args: $words
                  securityContext: {capabilities: {add: [SYS_RESOURCE]}}
                  env:
                    - {name: PROPE_PROCESSES, value: "$((hosts * slices))"}
                  ports:
                    - {containerPort: 8471, protocol: TCP} # between the TPU's hosts
                    - {containerPort: 8482, protocol: TCP} # JAX's coordinator
                  resources: {limits: {google.com/tpu: $per_host}}
                  volumeMounts:
                    - {name: shared-memory, mountPath: /dev/shm}
              volumes:
                - {name: shared-memory, emptyDir: {medium: Memory}}
YAML
)
if [[ $dry_run ]]; then
  echo "$yaml"
  exit
fi

# Prints the JobSet's name and terminal state; its name alone while it runs; nothing if there is none.
state() {
  kubectl get jobset "$name" --ignore-not-found --output=jsonpath='{.metadata.name} {.status.terminalState}'
}
before=$(state)
case $before in
  '') ;;
  *Completed | *Failed) kubectl delete jobset "$name" >&2 ;;
  *) fail "--name=$name: such a JobSet runs; end it with kubectl delete jobset $name, or take another name" ;;
esac
kubectl create --filename=- <<<"$yaml" >&2
first=(--container=prope --selector="jobset.sigs.k8s.io/jobset-name=$name,\
jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0") # the pod of process 0
echo "follow it: $(quoted kubectl logs --follow "${first[@]}")" >&2
while [[ $wait ]]; do
  sleep "$poll"
  after=$(state) || after=$name # where the cluster does not answer, the JobSet goes on
  case $after in
    *Completed) kubectl logs --tail=1 "${first[@]}" && exit ;;
    *Failed) echo "stopped: the JobSet $name has failed; its pods' logs say why" >&2 && exit 1 ;;
    '') echo "stopped: the JobSet $name has been deleted" >&2 && exit 1 ;;
  esac
done
