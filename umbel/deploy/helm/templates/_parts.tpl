{{- define "umbel.selector" -}}
app.kubernetes.io/name: umbel
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: {{ .Values.role }}
{{- end }}

{{- define "umbel.labels" -}}
{{ include "umbel.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "umbel.pod" -}}
automountServiceAccountToken: false
# Else the cluster's services would be variables of the site's process, and UMBEL_... are entries of its policy.
enableServiceLinks: false
terminationGracePeriodSeconds: 120
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .Values.user | int64 }}
  runAsGroup: {{ .Values.user | int64 }}
  fsGroup: {{ .Values.user | int64 }}
  # Only a new volume: on each start, it would open the ledger to the group.
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.pod }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "umbel.container" -}}
image: {{ .Values.image | quote }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "umbel.resources" -}}
requests: {{- toYaml .Values.requests | nindent 2 }}
limits:
  memory: {{ .Values.memory | default (ternary "2Gi" "4Gi" (eq .Values.role "server")) }}
{{- end }}

{{- /* A busy node starts Python slowly, and a busy process answers late: neither is a reason to start it again.
Alive and ready are apart: a full disk takes a pod out of service, and restarts nothing. */}}
{{- define "umbel.patience" -}}
startupProbe: {{- toYaml . | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 90
readinessProbe: {{- regexReplaceAll "(?m)/health$" (toYaml .) "/ready" | nindent 2 }}
  periodSeconds: 30
  timeoutSeconds: 10
livenessProbe: {{- toYaml . | nindent 2 }}
  periodSeconds: 60
  timeoutSeconds: 30
  failureThreshold: 10
{{- end }}

{{- define "umbel.executor-health" -}}
exec: {command: [python, umbel/deploy/health.py, "127.0.0.1:9095/health"]}
{{- end }}

{{- define "umbel.claim" -}}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ .name }}
  labels: {{- include "umbel.labels" .top | nindent 4 }}
  annotations:
    helm.sh/resource-policy: keep
spec:
  accessModes: [ReadWriteOnce]
  {{- with .top.Values.storage.className }}
  storageClassName: {{ . | quote }}
  {{- end }}
  resources: {requests: {storage: {{ .top.Values.storage.size | quote }}}}
{{- end }}

{{- define "umbel.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .Release.Name }}
  labels: {{- include "umbel.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ .Values.maxUnavailable }}
  selector:
    matchLabels: {{- include "umbel.selector" . | nindent 6 }}
{{- end }}
